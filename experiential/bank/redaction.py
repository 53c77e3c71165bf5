"""Remove keys, tokens and passwords of well-known forms from text, leaving a note of the kind.

Only forms that ordinary text does not have are looked for; a password in a plain sentence ("the
password is swordfish") stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple


class Redacted(NamedTuple):
    """Hold text without secrets, and how many of each kind were removed."""

    text: str
    kinds: Counter[str]


_TOKENS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "private_key",
            r"(?s)-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END"
            r" (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|\Z)",
        ),
        ("jwt", r"(?a)(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){1,3}"),
        (
            "aws_access_key",
            r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AIPA|ANPA|ANVA|AROA)[A-Z0-9]{16}"
            r"(?![A-Za-z0-9])",
        ),
        (
            "github_token",
            r"(?<![A-Za-z0-9])(?:gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,})",
        ),
        (
            "gitlab_token",
            r"(?a)(?<![A-Za-z0-9])(?:gl(?:agent|cbt|dt|ft|imt|oas|pat|ptt|rt|soat)-|GR1348941)"
            r"[\w-]{20,}",
        ),
        (
            "slack_token",
            r"(?<![A-Za-z0-9])(?:xox[a-z]-|xapp-\d-)[A-Za-z0-9-]{10,}|"
            r"hooks\.slack\.com/services/[A-Za-z0-9/_-]{20,}",
        ),
        ("google_api_key", r"(?a)(?<![\w-])(?:AIza[\w-]{35}|ya29\.[\w-]{20,})"),
        ("stripe_key", r"(?<![A-Za-z0-9])(?:[rs]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,}"),
        ("api_key", r"(?a)(?<![\w-])sk-(?:ant|proj|svcacct|admin|or|lf)-(?=[\w-]*\d)[\w-]{16,}"),
        ("api_key", r"(?a)(?<![\w-])sk-(?=[\w-]*?(?:\w{24}|(?=[A-Za-z_]*\d)\w{16}))[\w-]+"),
        (
            "access_token",
            r"(?a)(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,})",
        ),
    )
)
_HEADERS = (
    re.compile(
        r"(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+)([\w.~+/-]{8,}=*)",
        re.ASCII | re.IGNORECASE,
    ),
    re.compile(r"(\bbearer\s+)((?=[\w.~+/-]*\d)[\w.~+/-]{16,}=*)", re.ASCII | re.IGNORECASE),
)
_ADDRESS = re.compile(
    r"(\b[a-z][a-z0-9+.-]{1,20}://)[^\s/@:?#\"'<>\[\]]*:[^\s/@\"'<>]+@", re.IGNORECASE
)

_PASSWORD = r"pass(?:word|wd|phrase)|(?<![a-z])pwd"
_KEY = r"(?:api|access|client|secret|private|auth|encryption)[_-]?key"
_SECRET = (
    r"(?:client|app|shared|webhook|signing)[_-]?secret|(?:access|auth|refresh|bearer|api|"
    r"id|session|security)[_-]?token"
)
_NAME = rf"(?P<password>{_PASSWORD})|(?P<api_key>{_KEY})|(?P<secret>{_SECRET})"
_STEMS = ("pass", "pwd", "key", "secret", "token")
"""One of these stands in every name above: text without any is passed over quickly."""
_VALUE = r"(?P<value>\"[^\"\n]+\"|'[^'\n]+'|(?:\\?[\"'`])?[^\s\"'`]+)"
_ASSIGNMENT = re.compile(
    rf"(?P<head>(?:{_NAME}|(?P<loose>secret|token))\d{{0,2}}\\?[\"']?\s*(?P<sign>:=|=>|"
    rf"=(?!=)|:(?!:))\s*){_VALUE}",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"(?P<head>(?<!\S)--?(?:[a-z]+-)?(?:{_NAME})\s+(?!-)){_VALUE}", re.IGNORECASE)
_FIELD = re.compile(rf"[\w.-]*?(?:{_NAME})\d{{0,2}}", re.IGNORECASE)
_STAND_IN = re.compile(
    r"(?:\[redacted\b|[$%][a-z_{(]|<[a-z]|&lt;|\{\{?\w|[a-z_.]+[(\[]|your[_-]).*|"
    r"[*x.]+|none|null|nil|true|false|undefined|optional|required|str(?:ing)?",
    re.IGNORECASE | re.DOTALL,
)
_VARIED = re.compile(r"(?=.*[^\W\d])(?=.*[\d!@#$%^&*+~])", re.DOTALL)
_EDGES = re.compile(r"(\\?[\"'`]?)(.*?)([.,;:!?)\]}\\\"'`]*)", re.DOTALL)


def redact(text: str) -> Redacted:
    """Replace every secret of a known form by ``[redacted: kind]``. Idempotent.

    >>> redact("Log in with api_key=9f8e7d6c5b, then pull the red lever.").text
    'Log in with api_key=[redacted: api_key], then pull the red lever.'
    """
    kinds: Counter[str] = Counter()

    def note(kind: str) -> str:
        kinds[kind] += 1
        return f"[redacted: {kind}]"

    for kind, pattern in _TOKENS:
        text = pattern.sub(lambda _, kind=kind: note(kind), text)
    for pattern in _HEADERS:
        text = pattern.sub(lambda found: found[1] + note("bearer_token"), text)
    text = _ADDRESS.sub(lambda found: f"{found[1]}{note('url_password')}@", text)
    if any(stem in text.lower() for stem in _STEMS):
        text = _OPTION.sub(lambda found: _without_value(found, note), text)
        text = _ASSIGNMENT.sub(lambda found: _without_value(found, note), text)
    return Redacted(text, kinds)


def redact_field(name: str, value: str) -> Redacted:
    """Redact the value of a named field: whole if the name says that it is a secret.

    >>> redact_field("db_password", "swordfish").text
    '[redacted: password]'
    """
    found = _FIELD.fullmatch(name)
    if found is None or len(value) < 3 or _STAND_IN.fullmatch(value):
        return redact(value)
    kind = found.lastgroup or "secret"
    return Redacted(f"[redacted: {kind}]", Counter({kind: 1}))


def _without_value(found: re.Match[str], note: Callable[[str], str]) -> str:
    edges = _EDGES.fullmatch(found["value"])
    assert edges is not None  # its parts may be empty, so that it matches whatever stands there
    opening, value, tail = edges.groups()
    groups, is_varied = found.groupdict(), _VARIED.match(value) is not None
    if found.re is _OPTION:  # letters alone are no value: "--password is" may be prose about it
        is_secret = not value.isalpha() or found["value"][0] in "\"'"
    elif groups["loose"]:
        is_secret = len(value) >= 8 and is_varied
    else:  # anything after "=" or in quotes, but after a colon only text unlike a word
        is_sure = groups["sign"] != ":" or found["value"][0] in "\"'`\\"
        is_secret = is_sure or len(value) >= 6 and is_varied
    if len(value) < 3 or _STAND_IN.fullmatch(value) or not is_secret:
        return found[0]
    kind = next((name for name in ("password", "api_key") if found[name]), "secret")
    return f"{found['head']}{opening}{note(kind)}{tail}"
