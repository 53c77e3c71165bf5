"""The page app over a real run and its bank: every view, every change, who is let in, and the same
in a browser.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.evaluation.card import make_card
from experiential.evaluation.episode_log import arm_event, episode_row
from experiential.evaluation.play_log import PlayedEpisode, PlayedTurn, PlayLog, Retrieved
from experiential.rollout import Episode
from experiential.training.metrics import Metrics
from experiential.types import (
    Add,
    Condition,
    Distillation,
    Generation,
    ParsedOperations,
    Trajectory,
    Turn,
)
from experiential.ui.app import create_app
from experiential.ui.source import Source
from tests.test_card import ALL_ARMS

testclient = pytest.importorskip("starlette.testclient")

TOKEN = "let-me-in"
EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
TASK = "leave the castle"


def played(task: str, success: bool, hits: list[Any], guided: bool = True) -> Trajectory:
    condition = Condition.GUIDED if guided else Condition.FREE
    told = Trajectory(
        task=task,
        turns=(Turn(observation=f"You see {EVIL}", action="open the door", feedback="It opens."),),
        reward=float(success),
        success=success,
        condition=condition,
    )
    uses = tuple(hit.use("episode_start", episode=told.id) for hit in hits)
    return told.model_copy(update={"uses": uses})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that goes on, with a bank: a lesson that helped, one of an attacker, and
    a proposal.
    """
    run = tmp_path_factory.mktemp("made") / "mine"
    run.mkdir()
    log, metrics = Metrics(run / "episodes.jsonl"), Metrics(run / "metrics.jsonl")
    metrics.emit({"event": "start", "step": 0, "steps": 9, "recipe": "frozen", "seed": 0})
    with FolderBank(run / "bank", embedder="hashing", store="exact") as bank:
        door = bank.add("The red key opens the north door.", task=TASK)
        bank.add(EVIL, task="something else")
        for step in (1, 2, 3):
            hits = [hit for hit in bank.search(TASK, k=1) if hit.experience.id == door.id]
            members = [played(TASK, True, hits), played(TASK, False, [], guided=False)]
            for one in members:
                bank.submit(one)
            rows = [episode_row(Episode(one, (Generation(text="x"),))) for one in members]
            log.emit({"event": "episodes", "step": step, "rows": rows})
            event = {"event": "step", "step": step, "actor_loss": 0.5 / step, "staleness": 1.5}
            metrics.emit(event | {"tokens_per_s": 100.0, "step_s": 2.0, "actor_cost": 0.25})
        said = '<answer>[{"op": "add", "text": "Knock first."}]</answer>'
        distilled = Distillation(
            parsed=ParsedOperations(operations=(Add(text="Knock first."),)),
            generation=Generation(text=said),
        )
        last = members[-1]
        bank.apply(distilled, trajectory=last, shown=[], item=last.id, review=True)
        bank.queue.fail(members[0].id, "BackendError: gone", last=True)
    visits = [{"visit": n, "successes": n, "episodes": 4} for n in (1, 2)]
    outcomes = [[0, 1], [0, 1], [1, 0], [0, 0]]
    for arm in ("off", "on"):
        metrics.emit(
            {"event": "eval", "step": 3, "arm": arm, "visits": visits, "outcomes": outcomes}
        )
    log.close()
    metrics.close()
    (run / "card.json").write_text(make_card(ALL_ARMS).model_dump_json())
    return run


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "mine"))


@pytest.fixture
def page(folder: Path) -> Iterator[Any]:
    """A browser without scripts that was given the token."""
    source = Source(folder)
    client = testclient.TestClient(create_app(source, TOKEN), base_url="http://127.0.0.1:8000")
    assert client.get(f"/?token={TOKEN}").url.path == "/run"
    yield client
    source.close()


def entry_id(folder: Path, text: str) -> str:
    with xp.ExperienceBank(folder / "bank", read_only=True) as bank:
        return next(entry.id for entry in bank if text in entry.text)


def test_the_run_is_shown_with_intervals_losses_cost_and_polls_until_it_ends(
    page: Any, folder: Path
) -> None:
    text = page.get("/run").text
    assert "3 of 9" in text and "100% [44%, 100%]" not in text  # one guided episode a step
    assert "100% [21%, 100%]" in text and "0% [0%, 79%]" in text
    for found in ("Loss", "Staleness", "$0.7500", "600", 'hx-trigger="every 2s"'):
        assert found in text
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "end", "step": 3, "time": 0}\n')
    text = page.get("/run").text
    assert "It has ended" in text and "every 2s" not in text


def test_episodes_of_evaluations_and_of_a_suite_are_shown(page: Any, tmp_path: Path) -> None:
    told = played(TASK, True, [])
    log = Metrics(tmp_path / "mine" / "evaluation" / "episodes.jsonl")
    log.emit(arm_event("on", 3, [[Episode(told, (Generation(text="x"),))]], None))
    log.close()
    assert told.id[:8] not in page.get("/episodes").text
    assert told.id[:8] in page.get("/episodes?arm=on").text
    assert "evaluation: on, visit 1" in page.get(f"/episodes/{told.id}").text
    told = {"task_id": "lake", "prompt_tokens": 0, "response_tokens": 0, "seconds": 0.1}
    turn = PlayedTurn(observation="ice", action="go right", reward=1.0)
    advice = Retrieved(turn=0, id="0123456789", text=EVIL)
    one = PlayedEpisode(world=0, visit=0, success=True, reward=1.0, turns=1, shown=1, **told)
    with PlayLog(tmp_path / "log.jsonl", {}) as suite:
        suite.append(one.model_copy(update={"transcript": (turn,), "retrieved": (advice,)}))
    with closing(Source(tmp_path / "log.jsonl")) as source:
        client = testclient.TestClient(create_app(source, TOKEN), base_url="http://127.0.0.1:8000")
        listed = client.get(f"/?token={TOKEN}")
        assert listed.url.path == "/episodes" and "what it learned" not in listed.text
        text = client.get(f"/episodes/{source.episodes()[0].id}").text
        assert "go right" in text and EVIL not in text and "&lt;script&gt;" in text
        assert "<code>01234567</code>" in text and "/entries/" not in text


def test_the_evaluation_has_arms_differences_and_a_curve(page: Any) -> None:
    text = page.get("/evaluation").text
    assert "25 % [5, 70]" in text and "Held-out success on later visits" in text
    assert "on minus off" in text and "+100 [+7, +100]" in text


def test_pages_of_entries_take_the_beginning_of_an_id_also_of_a_retired_one(
    page: Any, folder: Path
) -> None:
    door, evil = entry_id(folder, "red key"), entry_id(folder, "document.title")
    assert door in page.get(f"/entries/{door[:9]}").text
    page.post(f"/entries/{evil}/retire")
    retired = page.get(f"/entries/{evil[:9]}").text
    assert evil in retired and "is retired" in retired
    missing = page.get("/entries/zz")
    assert missing.status_code == 404 and "Expected the id of an entry" in missing.text


def test_a_verdict_stands_beside_the_interval_and_uses_that_it_rests_on(
    page: Any, folder: Path
) -> None:
    door = entry_id(folder, "red key")
    with closing(Source(folder)) as source:
        [row] = [row for row in source.entries() if row.entry.id == door]
    low, high = (f"{100 * end:+.0f}" for end in row.standing.interval)
    assert row.standing.interval[0] < 0 < row.standing.interval[1] and row.helps > 0.7
    listed = page.get("/entries").text
    assert f"<td>unproven</td><td>{low} to {high}</td><td>3</td>" in listed
    text = " ".join(page.get(f"/entries/{door}").text.split())
    assert "<strong>unproven</strong>, from 3 uses with a known outcome. Success" in text
    assert f"{low} to {high} points" in text and "the interval contains zero" in text


def test_entries_are_ranked_searched_and_shown_with_their_episodes(page: Any, folder: Path) -> None:
    text = page.get("/entries").text
    assert text.index("The red key") < text.index("document.title")  # it helped
    assert "3 of 3 entries" in text and "proposed" in text
    found = page.get("/entries?q=RED castle").text
    assert "1 of 3 entries" in found and "document.title" not in found
    door = entry_id(folder, "red key")
    text = page.get(f"/entries/{door}").text
    episodes = re.findall(r"/episodes/(\w{32})", text)
    assert len(episodes) == 3 and "posterior of helping" in text
    # from the entry to an episode that it was shown in, and back
    text = page.get(f"/episodes/{episodes[0]}").text
    assert "advice shown (episode_start)" in text and f"/entries/{door}" in text
    assert text.index("You see") < text.index("advice shown") < text.index("open the door")


def test_an_episode_leads_to_what_was_written_from_it(page: Any, folder: Path) -> None:
    text = page.get("/episodes?outcome=failure&step=3").text
    [id] = set(re.findall(r"/episodes/(\w{32})", text))
    text = page.get(f"/episodes/{id}").text
    assert "Knock first." in text and entry_id(folder, "Knock") in text
    assert "the extractor&#39;s answer" in text or "the extractor's answer" in text
    assert page.get("/episodes?task=nowhere").text.count("/episodes/") == 0


def test_every_change_is_a_commit(page: Any, folder: Path) -> None:
    with xp.ExperienceBank(folder / "bank", read_only=True) as bank:
        head = bank.head
    door, knock = entry_id(folder, "red key"), entry_id(folder, "Knock")
    changed = page.post(f"/entries/{door}/edit", data={"text": "The blue key opens it.\r\nReally."})
    assert changed.url.path == f"/entries/{door}" and "<ins>blue</ins>" in changed.text
    back = page.post(f"/entries/{door}/restore", data={"version": "1"})
    assert "version 3" in back.text
    approved = page.post(f"/entries/{knock}/approve").text
    assert "unproven" in approved and "Approve" not in approved
    retired = page.post(f"/entries/{knock}/retire").text
    assert "This entry is retired" in retired and "/edit" not in retired
    with xp.ExperienceBank(folder / "bank", read_only=True) as bank:
        log = [commit for commit in bank.history() if commit.id > head]
        assert [one.cause for one in log] == ["update", "update", "approve", "remove"]
        assert {one.author for one in log} == {"human"}
        assert bank.version(door, 2).text == "The blue key opens it.\nReally."
        assert bank.get(door).text == "The red key opens the north door."
    assert "Roll back to here" in page.get("/commits").text
    page.post("/commits/rollback", data={"commit": str(head)})
    with xp.ExperienceBank(folder / "bank", read_only=True) as bank:
        assert bank.get(knock).proposed and bank.get(door).version == 1
        assert bank.commits()[-1].cause == "rollback"


def test_dead_letters_are_listed_and_queued_again(page: Any, folder: Path) -> None:
    text = page.get("/dead-letters").text
    assert "BackendError: gone" in text
    [id] = re.findall(r'name="id" value="(\w+)"', text)
    assert (
        "no distillation was given up" in page.post("/dead-letters/requeue", data={"id": id}).text
    )
    with xp.ExperienceBank(folder / "bank", read_only=True) as bank:
        assert id in bank.queue.waiting()


def test_a_bank_that_is_being_written_is_shown_and_not_changed(page: Any, folder: Path) -> None:
    door = entry_id(folder, "red key")
    with xp.ExperienceBank(folder / "bank") as bank:
        bank.add("Written meanwhile.")
        text = page.get("/entries").text
        assert "This process writes this bank" in text and "Written meanwhile." in text
        assert "<form method" not in page.get(f"/entries/{door}").text
        refused = page.post(f"/entries/{door}/edit", data={"text": "no"})
        assert refused.status_code == 423 and "Expected one writer" in refused.text
        assert bank.get(door).text != "no"
    assert "writes this bank" not in page.get("/entries").text


def test_only_the_browser_with_the_token_gets_in(folder: Path) -> None:
    app = create_app(Source(folder), TOKEN)

    def client(host: str = "127.0.0.1:8000") -> Any:
        return testclient.TestClient(app, base_url=f"http://{host}")

    stranger = client()
    for path in ("/", "/run", "/static/style.css", "/?token=guess", "/nope"):
        assert stranger.get(path).status_code == 403
    assert stranger.post("/commits/rollback", data={"commit": "0"}).status_code == 403
    # a name of someone else's that leads here
    assert client("evil.example").get(f"/?token={TOKEN}").status_code == 403
    for host in ("localhost:9", "[::1]:9"):
        assert client(host).get(f"/run?token={TOKEN}").status_code == 200
    known = client()
    landed = known.get(f"/entries?q=key&token={TOKEN}")
    assert str(landed.url).endswith("/entries?q=key")  # the token leaves the address
    assert "httponly" in landed.history[0].headers["set-cookie"].lower()
    aside = known.get(f"//evil.example/?token={TOKEN}", follow_redirects=False)
    assert not aside.headers.get("location", "/").startswith("//")
    # another site's form, with the cookie that the browser adds
    for forged in ({"origin": "http://evil.example"}, {"sec-fetch-site": "same-site"}):
        refused = known.post("/commits/rollback", data={"commit": "0"}, headers=forged)
        assert refused.status_code == 403
    policy = known.get("/run").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_text_stays_text_and_wrong_requests_are_explained(page: Any, folder: Path) -> None:
    evil = entry_id(folder, "document.title")
    episode = re.findall(r"/episodes/(\w{32})", page.get("/episodes").text)[0]
    for path in ("/entries", f"/entries/{evil}", f"/episodes/{episode}", f"/entries?q={EVIL}"):
        text = page.get(path).text
        assert "&lt;script&gt;" in text and "<script>" not in text and "<img" not in text
    assert page.get("/entries/zz").status_code == 404
    assert page.get("/episodes/zz").status_code == 404
    assert page.get("/static/..%2Fapp.py").status_code == 404
    assert page.get("/episodes?step=x").status_code == 400
    assert page.post(f"/entries/{evil}/edit", data={}).status_code == 400
    assert page.post(f"/entries/{evil}/edit", data={"text": ""}).status_code == 400
    assert page.post(f"/entries/{evil}/edit", data={"text": "x" * 2**21}).status_code == 400


def test_a_bank_alone_has_no_run(folder: Path) -> None:
    page = testclient.TestClient(
        create_app(Source(folder / "bank"), TOKEN), base_url="http://127.0.0.1"
    )
    home = page.get(f"/?token={TOKEN}")
    assert home.url.path == "/entries" and 'href="/run"' not in home.text
    assert page.get("/episodes").text.count("<code>") == 6


def test_the_report_is_one_page_with_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(main.app, ["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out.replace("\n", "")
    text = (folder / "report.html").read_text()
    for found in ("3 of 9", "on minus off", "The red key", "Knock first.", "BackendError: gone"):
        assert found in text
    assert "<script" not in text and "<form" not in text and "&lt;script&gt;" in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text) and "http:" not in re.sub(
        r"http://www.w3.org|https?://picocss.com", "", text
    )
    door = entry_id(folder, "red key")
    assert f'id="{door}"' in text and f'href="#{door}"' in text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_in_a_browser(folder: Path) -> None:
    """What scripts and the browser itself do: search while typing, changes, a narrow window."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: pip install playwright"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "experiential.cli.main", "ui", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        base, _, _ = address.partition("/?")
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox"], timeout=60_000
            )
            page = browser.new_page()
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: said.append(dialog.message))
            page.goto(address)
            assert page.url == f"{base}/run"
            with (folder / "metrics.jsonl").open("a") as file:  # the page follows the run
                file.write('{"event": "step", "step": 4, "time": 0, "staleness": 7.5}\n')
            page.wait_for_selector("text=4 of 9", timeout=20_000)
            page.click("text=what it learned")
            assert page.locator("tbody tr").count() == 3
            page.locator("input[type=search]").press_sequentially("red")
            page.wait_for_selector("text=1 of 3 entries")
            page.click("tbody a")
            page.fill("textarea", "The green key opens the north door.")
            page.click("text=Save as the next version")
            assert page.locator("ins").all_inner_texts() == ["green"]
            page.click("text=Roll back to this text")
            assert page.input_value("textarea") == "The red key opens the north door."
            page.goto(f"{base}/entries")
            page.locator("tr", has_text="Knock first.").locator("a").click()
            page.click("button:has-text('Approve')")
            assert page.locator("button:has-text('Approve')").count() == 0
            page.click("text=history")
            page.locator("tr", has_text="approve").locator(
                "xpath=following-sibling::tr[1]"
            ).locator("button").click()
            assert page.locator("tbody tr").first.inner_text().split("\t")[3].startswith("rollback")
            page.goto(f"{base}/entries?q=document")
            assert "owned" not in page.title() and page.locator("main img").count() == 0
            assert EVIL in page.inner_text("main")
            page.set_viewport_size({"width": 390, "height": 844})
            paths = ["run", "evaluation", "entries", "episodes", "commits", "dead-letters"]
            for path in paths:
                page.goto(f"{base}/{path}")
                wide, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                assert wide <= window == 390, path
            for path in ("entries", "episodes"):
                page.goto(f"{base}/{path}")
                page.click("tbody a")
                page.wait_for_selector("h1")
                wide, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                assert wide <= window == 390, path
            assert said == []
            browser.close()
    finally:
        process.terminate()
        process.wait(20)
