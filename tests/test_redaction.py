"""Secrets are taken out of text, and ordinary text stays as it is. All keys here are made up."""

from __future__ import annotations

import pytest

from experiential.bank.text import redact, redact_field
from experiential.envs.vault import VaultEnv

SECRETS = [
    ("aws_access_key", "AKIAIOSFODNN7EXAMPLE"),
    ("aws_access_key", "ASIAIOSFODNN7EXAMPLE"),
    ("github_token", "ghp_" + "a1B2" * 9),
    ("github_token", "gho_" + "Z9y8" * 9),
    ("github_token", "github_pat_" + "A1b2_" * 12),
    ("gitlab_token", "glpat-" + "x1Y2-" * 4),
    ("api_key", "sk-" + "a1B2c3D4" * 6),
    ("api_key", "sk-proj-" + "ab1-_C" * 12),
    ("api_key", "sk-ant-api03-" + "abC1-_dE2" * 10),
    ("api_key", "sk-or-v1-" + "0123abcd" * 8),
    ("stripe_key", "sk_live_" + "4eC39HqL" * 3),
    ("google_api_key", "AIza" + "Sy1_-" * 7),
    ("google_api_key", "ya29.a0" + "AbC1_" * 8),
    ("slack_token", "xoxb-123456789012-123456789012-AbCdEfGhIj"),
    ("slack_token", "xapp-1-A0123456789-0123456789-abcdef"),
    ("slack_token", "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXXXXXXXXXX"),
    ("access_token", "hf_" + "aBcDeFgHiJ" * 4),
    ("jwt", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"),
    ("jwt", "eyJhbGciOiJub25lIn0.eyJzdWIiOiIxMjM0In0."),
    (
        "private_key",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nAAb+/=\n-----END RSA PRIVATE KEY-----",
    ),
    ("private_key", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA"),
    (
        "private_key",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF\n-----END PGP PRIVATE KEY BLOCK-----",
    ),
    ("bearer_token", "Authorization: Bearer abcdefghij"),
    ("bearer_token", "-H 'authorization: Basic dXNlcjpwYXNz'"),
    ("bearer_token", "bearer 0123456789abcdef01"),
    ("password", "password=hunter2"),
    ("password", 'password = "correct horse"'),
    ("password", "PASSWORD: hunter2"),
    ("password", '{"password": "swordfish"}'),
    ("password", r"{\"password\": \"swordfish\"}"),
    ("password", "DB_PASSWORD=letmein!"),
    ("password", "userPassword := 'x y z'"),
    ("password", 'passwd="unended'),
    ("password", "login --password hunter2"),
    ("api_key", "api_key=abc"),
    ("api_key", "X-Api-Key: 12ab34cd"),
    ("api_key", "https://example.org/?apikey=abc123&x=1"),
    ("api_key", "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    ("secret", "client_secret=abcdefg"),
    ("secret", "token=abcd1234ef"),
    ("url_password", "postgres://bob:s3cr3t@db.example.org/x"),
    ("url_password", "https://user:p%40ss@example.org"),
    ("url_password", "redis://:secretpw@localhost:6379"),
]

ORDINARY = [
    "The password is swordfish.",
    "Password: ask the guard twice.",
    "Use the secret: push the third brick.",
    "secret door: 3rd brick",
    "token: red",
    "token: 3 coins",
    "set token=5 and go on",
    "Say 'password' twice: once low, once loud.",
    "passwords: 3 remain",
    "use --password to log in",
    "Keys: brass=1, iron=2; key=value",
    "risk-assessment-2024-final-version-of-the-plan",
    "pip install sk-learn-contrib-extra-tools",
    "task-0123456789abcdef0123",
    "#a1b2c3 #ff00aa #FFF",
    "123e4567-e89b-12d3-a456-426614174000",
    "sha256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "/usr/lib/python3.11/site-packages/api_key/token.py",
    r"C:\Users\bob\secret\key.txt",
    "https://example.org:8080/a@b?x=1#y",
    "http://localhost:8000/",
    "git@github.com:org/repo.git and mailto:bob@example.org",
    "if password == x: return",
    "api_key: string",
    "password=$PASSWORD",
    "password=${DB_PASSWORD}",
    "api_key=os.environ['KEY']",
    "password=getpass()",
    "password=<your password>",
    "password=&lt;answer>",
    "password=***",
    "password=None",
    "Authorization: required before entry",
    "the bearer of the brass key may pass",
    "AKIA is a prefix, eyJ another, sk- a third",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "At 12:30:45 the ratio was 3:1@noon.",
]


@pytest.mark.parametrize(("kind", "secret"), SECRETS)
def test_a_secret_is_replaced_by_its_kind(kind: str, secret: str) -> None:
    text, kinds = redact(f"First look. {secret}")
    assert kinds == {kind: 1} and text.startswith("First look. ") and f"[redacted: {kind}]" in text
    hidden = (
        secret.removeprefix("Authorization: Bearer ")
        .rpartition("=")[2]
        .rpartition(" ")[2]
        .strip("\"'}\\")
    )
    assert hidden not in text
    assert redact(text) == (text, {})


def test_what_stands_around_secrets_stays() -> None:
    text, kinds = redact(
        "Use (api_key=9f8e7d6c5b), then ghp_"
        + "a1B2" * 9
        + "; AKIAIOSFODNN7EXAMPLE, AKIAIOSFODNN7EXAMPLF."
    )
    assert (
        text == "Use (api_key=[redacted: api_key]), then [redacted: github_token]; [redacted:"
        " aws_access_key], [redacted: aws_access_key]."
    )
    assert kinds == {"api_key": 1, "github_token": 1, "aws_access_key": 2}
    assert redact("ftp://a:b@c/d").text == "ftp://[redacted: url_password]@c/d"


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == (text, {})


def test_vault_lessons_stay() -> None:
    env = VaultEnv()
    for name, lever in zip(env.names, ("jade", "amber", "red"), strict=False):
        lesson = (
            f"The vault of {name}: its {lever} lever is live, the key turns left. Token of {name}:"
            " none."
        )
        assert redact(lesson) == (lesson, {})


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("password", "swordfish", "[redacted: password]"),
        ("db-password", "a b c", "[redacted: password]"),
        ("apiKey", "abc", "[redacted: api_key]"),
        ("access_token", "abc", "[redacted: secret]"),
        ("password", "none", "none"),
        ("password_hint", "a fish", "a fish"),
        ("note", "see AKIAIOSFODNN7EXAMPLE", "see [redacted: aws_access_key]"),
        ("colour", "jade", "jade"),
    ],
)
def test_a_field_named_like_a_secret_is_taken_out_whole(name: str, value: str, kept: str) -> None:
    assert redact_field(name, value).text == kept


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        "password=",
        "password ",
        "a://",
        "a://b:",
        "sk-",
        "sk-a-",
        "eyJ",
        "eyJaaaaaaaa.",
        "token: '",
        "-----BEGIN PRIVATE KEY-----",
        "bearer ",
    ],
)
def test_long_text_takes_linear_time(piece: str) -> None:
    redact(piece * (200_000 // len(piece)))
