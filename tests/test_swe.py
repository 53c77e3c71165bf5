"""SWE: tool calls as text, the editor, limits and isolation of commands, hidden tests, predictions;
and the bundled tasks for real.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

import experiential.envs as envs
from experiential.envs.swe.call import Call, read_call
from experiential.envs.swe.editor import BadCallError, Editor, RefusedError
from experiential.envs.swe.env import SWEEnv
from experiential.envs.swe.predictions import write_predictions
from experiential.envs.swe.repository import apply, commit_all
from experiential.envs.swe.sandbox import Limits, Place, Result, isolated, shortened
from experiential.envs.swe.task import load_tasks
from experiential.envs.swe.workspace import Workshop, _passed
from experiential.errors import ConfigError

ID = "experiential/SWE-v0"
FILES = {
    "calc/__init__.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return a * 2\n",
    "README": "A calculator.\n",
    "tests/test_calc.py": "import calc\n\n\ndef test_double():\n    assert calc.double(4) == 8\n",
    # What pytest prints, without pytest: nothing is installed in these tests.
    "tests/run.py": (
        """
import importlib.util, sys
print("=== short test summary info ===")
for file in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("it", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, test in list(vars(module).items()):
        if name.startswith("test_"):
            try:
                test()
                print(f"PASSED {file}::{name}")
            except AssertionError as error:
                print(f"FAILED {file}::{name} - {error}")
"""
    ),
}
PATCH = """\
diff --git a/calc/__init__.py b/calc/__init__.py
--- a/calc/__init__.py
+++ b/calc/__init__.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def double(a):
"""
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,5 +1,9 @@
 import calc
 
 
+def test_add_hidden():
+    assert calc.add(2, 3) == 5
+
+
 def test_double():
     assert calc.double(4) == 8
"""
ROW: dict[str, Any] = {
    "instance_id": "mini__calc-1",
    "repo": "mini/calc",
    "base_commit": "abc",
    "problem_statement": "add subtracts",
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": (
        '["tests/test_calc.py::test_add_hidden"]'
    ),  # as SWE-bench has it: a list as text
    "PASS_TO_PASS": ["tests/test_calc.py::test_double"],
    "version": "1",
    "requirements": [],
    "test_command": ["python", "tests/run.py"],
    "split": "train",
}
SUBMIT = "<function=submit></function>"


def bash(command: str) -> str:
    return f"<function=execute_bash><parameter=command>{command}</parameter></function>"


def edit(command: str, path: str, **parameters: str) -> str:
    known = {"command": command, "path": path, **parameters}
    inside = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in known.items()
    )
    return f"<function=str_replace_editor>\n{inside}</function>"


def archive(file: Path, files: dict[str, str]) -> None:
    with tarfile.open(file, "w:gz") as packed:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"calc-1/{name}")
            entry.size = len(text.encode())
            packed.addfile(entry, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, their source and a cache that the tests share."""
    folder = tmp_path_factory.mktemp("swe")
    archive(folder / "mini__calc-1.tar.gz", FILES)
    (folder / "tasks.jsonl").write_text(
        "".join(
            json.dumps(ROW | {"instance_id": f"mini__calc-{n}", "source": "mini__calc-1.tar.gz"})
            + "\n"
            for n in (1, 2)
        )
    )
    return folder


@pytest.fixture
def env(folder: Path) -> Iterator[SWEEnv]:
    env = SWEEnv(
        tasks=str(folder / "tasks.jsonl"), cache=str(folder / "cache"), seconds=20, turns=12
    )
    env.reset(options={"world": 0})
    yield env
    env.close()


def step(env: SWEEnv, action: str) -> str:
    observation, _, terminated, truncated, info = env.step(action)
    assert not (terminated or truncated or info["invalid"]), observation
    return observation


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (bash("ls"), Call("execute_bash", {"command": "ls"})),
        ("I look.\n" + bash("a") + "\nno:\n" + bash("b"), Call("execute_bash", {"command": "b"})),
        (
            "<FUNCTION=Execute_Bash> <PARAMETER=Command>ls</PARAMETER> </FUNCTION>",
            Call("execute_bash", {"command": "ls"}),
        ),
        (
            "<function=execute_bash><parameter=command>\n  a\n    b\n\n</parameter></function>",
            Call("execute_bash", {"command": "  a\n    b\n"}),
        ),
        (
            "<function=execute_bash><parameter=command>never closed",
            Call("execute_bash", {"command": "never closed"}),
        ),
        (
            "<function=execute_bash><parameter=command>ls</function>",
            Call("execute_bash", {"command": "ls"}),
        ),
        (bash("grep '</parameter>' x"), Call("execute_bash", {"command": "grep '</parameter>' x"})),
        (
            bash("grep '<function=submit>' x"),
            Call("execute_bash", {"command": "grep '<function=submit>' x"}),
        ),
        ("first " + SUBMIT + " or " + bash("ls"), Call("execute_bash", {"command": "ls"})),
        ("<function=submit>", Call("submit", {})),
        (
            '{"name": "execute_bash", "arguments": {"command": "a\\nb"}}',
            Call("execute_bash", {"command": "a\nb"}),
        ),
        ('```json\n{"tool": "submit"}\n```', Call("submit", {})),
        ('<tool_call>{"name": "a", "arguments": {"n": 1}}</tool_call>', Call("a", {"n": 1})),
        ('{"name": "a"} then {"name": "b", "parameters": {}}', Call("b", {})),
        ("ls -la", None),
        ("", None),
        ("<function=> x", None),
        ("use <function=submit> when done", None),
        ('{"name": 3}', None),
        ("x" * 10_000_000, None),
    ],
)
def test_the_last_call_counts_in_either_form(action: str, call: Call | None) -> None:
    assert read_call(action) == call


@given(st.text("<>/=function parameter\n{}\"':submit", max_size=120))
def test_reading_a_call_never_fails(text: str) -> None:
    found = read_call(text)
    assert found is None or isinstance(found.tool, str)


@pytest.mark.parametrize(
    "text",
    [
        "<function=a>" * 8_000,
        "<function=a><parameter=b>" * 4_000,
        "</parameter>" * 8_000,
        '{"name":' * 12_000,
        "<function=a><parameter=b>" + "</parameter> " * 7_000,
    ],
)
def test_reading_a_long_hostile_text_is_fast(text: str) -> None:
    before = time.process_time()
    read_call(text)
    assert time.process_time() - before < 5  # quadratic reading takes minutes


def call(command: str, path: str = "a.py", **parameters: Any) -> Call:
    return Call("str_replace_editor", {"command": command, "path": path, **parameters})


@pytest.fixture
def editor(tmp_path: Path) -> Editor:
    (tmp_path / "a.py").write_bytes(b"one\ntwo\nthree\ntwo\n")
    return Editor(tmp_path, Path("/shown"))


def test_the_editor_views_files_ranges_and_folders(editor: Editor, tmp_path: Path) -> None:
    assert editor.run(call("view")) == "     1\tone\n     2\ttwo\n     3\tthree\n     4\ttwo"
    assert editor.run(call("view", view_range="[2, 3]")) == "     2\ttwo\n     3\tthree"
    assert (
        editor.run(call("view", "/shown/a.py", view_range=[3, -1])) == "     3\tthree\n     4\ttwo"
    )
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "c" / "deep").touch()
    (tmp_path / ".hidden").touch()
    assert editor.run(call("view", ".")) == "a.py\nb/\nb/c/"
    for bad in ("[1]", "x", "[true, 2]", "[" * 5000):
        with pytest.raises(BadCallError, match="view_range"):
            editor.run(call("view", view_range=bad))
    with pytest.raises(RefusedError, match="within the 4 lines"):
        editor.run(call("view", view_range=[9, 12]))


def test_a_replacement_must_be_unique_and_can_be_undone(editor: Editor, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"2 times in a.py \(lines 2, 4\)"):
        editor.run(call("str_replace", old_str="two", new_str="2"))
    with pytest.raises(RefusedError, match="does not stand"):
        editor.run(call("str_replace", old_str="four", new_str="4"))
    shown = editor.run(call("str_replace", old_str="one\ntwo", new_str="1"))
    assert (tmp_path / "a.py").read_text() == "1\nthree\ntwo\n" and shown.startswith(
        "a.py was edited:\n     1\t1"
    )
    editor.run(call("str_replace", old_str="three"))
    assert (tmp_path / "a.py").read_text() == "1\n\ntwo\n"
    editor.run(call("undo_edit"))
    editor.run(call("undo"))
    assert (tmp_path / "a.py").read_text() == "one\ntwo\nthree\ntwo\n"
    with pytest.raises(RefusedError, match="Nothing was edited"):
        editor.run(call("undo"))


def test_insert_goes_after_the_line_and_create_makes_folders_but_overwrites_nothing(
    editor: Editor, tmp_path: Path
) -> None:
    editor.run(call("insert", insert_line="0", new_str="zero"))
    editor.run(call("insert", insert_line=5, new_str="end\nof it"))
    assert (tmp_path / "a.py").read_text() == "zero\none\ntwo\nthree\ntwo\nend\nof it\n"
    with pytest.raises(RefusedError, match="between 0 and 7"):
        editor.run(call("insert", insert_line=8, new_str="x"))
    with pytest.raises(BadCallError, match="whole number"):
        editor.run(call("insert", insert_line="last", new_str="x"))
    editor.run(call("create", "new/b.py", file_text="x = 1"))
    assert (tmp_path / "new" / "b.py").read_text() == "x = 1\n"
    with pytest.raises(RefusedError, match="exists already"):
        editor.run(call("create", "new/b.py", file_text="x = 2"))
    editor.run(call("undo", "new/b.py"))
    assert not (tmp_path / "new" / "b.py").exists()


def test_line_ends_of_a_file_are_kept(editor: Editor, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"one\r\ntwo\r\n\x0cthree")
    editor.run(call("str_replace", old_str="one\ntwo", new_str="1\n2"))
    editor.run(call("insert", insert_line=3, new_str="four"))
    assert (tmp_path / "a.py").read_bytes() == b"1\r\n2\r\n\x0cthree\r\nfour\r\n"


def test_the_editor_leaves_its_folder_by_no_way(editor: Editor, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-secret"
    outside.write_text("secret")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "up").symlink_to(tmp_path.parent)
    for path in (
        "link",
        f"up/{outside.name}",
        f"../{outside.name}",
        str(outside),
        "/etc/passwd",
        ".git/config",
        "a\0b",
    ):
        for one in (
            call("view", path),
            call("create", path, file_text="x"),
            call("str_replace", path, old_str="secret"),
        ):
            with pytest.raises(RefusedError):
                editor.run(one)
    assert outside.read_text() == "secret"


@pytest.mark.parametrize("data", [b"a\0b", b"\xff\xfe", b"x" * 2_000_001])
def test_what_is_no_text_is_refused(editor: Editor, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.py").write_bytes(data)
    with pytest.raises(RefusedError):
        editor.run(call("view"))


@pytest.mark.parametrize(
    ("one", "what"),
    [
        (call("delete"), "command"),
        (call("create"), "file_text"),
        (Call("x", {"command": "view"}), "path"),
    ],
)
def test_a_bad_call_says_what_is_legal(editor: Editor, one: Call, what: str) -> None:
    with pytest.raises(BadCallError, match=what):
        editor.run(one)


@given(
    st.dictionaries(
        st.sampled_from(["command", "path", "old_str", "new_str", "insert_line", "view_range"]),
        st.text(max_size=8) | st.integers() | st.none(),
    )
)
def test_no_call_makes_the_editor_fail(
    tmp_path_factory: pytest.TempPathFactory, parameters: dict[str, Any]
) -> None:
    for command in ("view", "str_replace", "insert", "undo", "create"):
        try:
            Editor(tmp_path_factory.getbasetemp(), Path("/shown")).run(
                Call("x", parameters | {"command": command, "path": "no/file"})
            )
        except (BadCallError, RefusedError):
            continue


@pytest.fixture(params=["auto", "off"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    for name in ("work", "box", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "private" / "gold").write_text("gold")
    return Place(
        tmp_path / "work",
        tmp_path / "box",
        (tmp_path / "private",),
        {"HERE": "{root}/repo"},
        isolated(request.param),
    )


def test_commands_see_their_folder_their_variables_and_no_input(place: Place) -> None:
    result = place.run("pwd; echo $HERE; cat; echo err >&2; touch $TMPDIR/x; exit 3", Limits(20))
    assert result == Result(f"{place.root}/repo\n{place.root}/repo\nerr\n", 3, False)
    assert "SECRET" not in place.run("env", Limits(20)).text


def test_time_is_limited_and_every_process_of_a_command_dies(place: Place) -> None:
    result = place.run(
        "echo begun; (while true; do echo x >> alive; sleep 0.05; done) & sleep 60", Limits(1.5)
    )
    assert result.timed_out and result.text == "begun\n"
    size = (place.folder / "repo" / "alive").stat().st_size
    place.run("(while true; do echo x >> other; sleep 0.05; done) & sleep 0.3", Limits(20))
    other = (place.folder / "repo" / "other").stat().st_size
    time.sleep(0.4)
    assert (place.folder / "repo" / "alive").stat().st_size == size and (
        place.folder / "repo" / "other"
    ).stat().st_size == other


def test_memory_and_files_are_limited(place: Place) -> None:
    result = place.run(
        f"{sys.base_prefix}/bin/python3 -c 'x = bytearray(900 * 2**20)'", Limits(20, memory=600)
    )
    assert result.status == 1 and "MemoryError" in result.text
    place.run("head -c 400M /dev/zero > big", Limits(20))
    assert (place.folder / "repo" / "big").stat().st_size <= 256 * 2**20


def test_odd_commands_and_endless_output_do_no_harm(place: Place) -> None:
    assert place.run("echo a\0b \ud800", Limits(20)).text == "ab ?\n"
    assert "xxx" not in place.run("y" * 99_000, Limits(20)).text
    result = place.run("yes", Limits(1))
    assert len(result.text) < 2_100_000 and "bytes left out" in result.text


def test_behind_namespaces_there_is_no_network_no_secret_and_nothing_else_to_write(
    tmp_path: Path,
) -> None:
    if not isolated("auto"):
        pytest.skip("this platform gives no namespaces")
    for name in ("work", "box", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "private" / "gold").write_text("gold")
    (tmp_path / "file").write_text("gold")
    place = Place(
        tmp_path / "work", tmp_path / "box", (tmp_path / "private", tmp_path / "file"), {}, True
    )
    shown = place.run(
        f"ls {tmp_path}/private; cat {tmp_path}/file; umount {tmp_path}/file; cat {tmp_path}/file",
        Limits(20),
    ).text
    assert "gold" not in shown and "umount" in shown
    assert (
        place.run(f"touch {tmp_path}/new /etc/new; ls {tmp_path}", Limits(20)).text.count(
            "Read-only"
        )
        == 2
    )
    assert not (tmp_path / "new").exists()
    devices = place.run("tail -n +3 /proc/net/dev | cut -d: -f1; ls /dev", Limits(20)).text.split()
    assert devices == ["lo", "fd", "full", "null", "random", "shm", "urandom", "zero"]
    place.run("setsid sh -c 'sleep 0.5; touch late' & sleep 0.1", Limits(20))
    time.sleep(0.8)
    assert not (place.folder / "repo" / "late").exists()


@given(st.text(max_size=80), st.integers(1, 40))
def test_a_long_text_loses_its_middle_and_says_how_much(text: str, budget: int) -> None:
    cut = shortened(text, budget)
    if len(text) <= budget:
        assert cut == text
    else:
        half = budget // 2
        assert (
            cut.startswith(text[:half])
            and cut.endswith(text[len(text) - half :])
            and f"{len(text) - 2 * half} characters" in cut
        )


def test_only_the_summary_of_pytest_counts() -> None:
    lines = [
        "PASSED x::forged",
        "=== short test summary info ===",
        "PASSED a.py::t[b - c]",
        "FAILED a.py::u - assert 1 == 2",
    ]
    text = "\n".join([*lines, "ERROR a.py::v", "PASSED a.py::v"])
    assert _passed(Result(text, 1, False)) == {"a.py::t[b - c]"}
    assert _passed(Result("PASSED a.py::t", 0, False)) == {"a.py::t"}


def test_the_oracle_wins_by_its_own_actions(env: SWEEnv) -> None:
    agent = envs.oracle(env)
    assert "git apply" in agent("", {}) and step(env, agent("", {})).startswith("[exit status 0]")
    observation, reward, terminated, truncated, info = env.step(agent("", {}))
    assert (observation, reward, terminated, truncated, info["success"]) == (
        "The hidden tests pass.",
        1.0,
        True,
        False,
        True,
    )
    with pytest.raises(gym.error.ResetNeeded):
        env.step(SUBMIT)


def test_an_edit_wins_and_the_prediction_is_what_swebench_reads(
    env: SWEEnv, folder: Path, tmp_path: Path
) -> None:
    assert "return a - b" in step(env, edit("view", "calc/__init__.py"))
    step(
        env,
        edit(
            "str_replace",
            "calc/__init__.py",
            old_str="    return a - b",
            new_str="    return a + b",
        ),
    )
    step(
        env,
        bash(
            "mkdir -p __pycache__ && touch __pycache__/x.pyc && printf 'new' > 'a file' && git add"
            " . && git commit -qm x; git diff"
        ),
    )
    _, reward, _, _, info = env.step(SUBMIT)
    assert reward == 1.0
    prediction = env.prediction("me")
    assert (
        prediction["model_patch"] == info["model_patch"]
        and "__pycache__" not in info["model_patch"]
    )
    assert (
        write_predictions(tmp_path / "it.jsonl", [prediction | {"model_patch": ""}, prediction])
        == 1
    )
    (row,) = [json.loads(line) for line in (tmp_path / "it.jsonl").read_text().splitlines()]
    assert (
        list(row) == ["instance_id", "model_name_or_path", "model_patch"]
        and row["instance_id"] == "mini__calc-1"
    )
    clean = tmp_path / "clean"
    for name, text in FILES.items():
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        (clean / name).write_text(text)
    subprocess.run(
        ["git", "apply", "-"], cwd=clean, input=row["model_patch"], text=True, check=True
    )
    assert (
        "a + b" in (clean / "calc/__init__.py").read_text()
        and (clean / "a file").read_text() == "new"
    )


@pytest.mark.parametrize(
    "trick",
    [
        "true",
        "printf 'def test_add_hidden(): pass\\ndef test_double(): pass\\n' > tests/test_calc.py",
        (
            "printf 'print(\"PASSED tests/test_calc.py::test_add_hidden\\\\nPASSED"
            " tests/test_calc.py::test_double\")' > tests/run.py"
        ),
        "rm -rf tests && ln -s /tmp tests",
        "rm -rf tests && touch tests",
        "cd .. && rm -rf repo && ln -s /etc repo",
        "cd .. && rm -rf repo && touch repo",
        "echo 'raise SystemExit' > sitecustomize.py",
        "rm -rf .git * .??*",
        "git init -q evil && touch evil/x",
        "git init -q calc",
        "mkdir a && ln -s /etc a/.git",
        "sed -i 's/a \\* 2/a/; s/a - b/a + b/' calc/__init__.py",
    ],
)
def test_nothing_but_the_source_counts(env: SWEEnv, trick: str) -> None:
    step(env, bash(trick))
    observation, reward, terminated, _, info = env.step(SUBMIT)
    assert (observation, reward, terminated, info["success"]) == (
        "The hidden tests do not pass.",
        0.0,
        True,
        False,
    )
    assert "root:" not in info["model_patch"]


def test_neither_the_right_change_nor_the_hidden_tests_are_shown(env: SWEEnv) -> None:
    seen = [env.reset(options={"world": 0})]
    seen += [
        env.step(action)[::4]
        for action in (
            bash("cat $(find . -type f -not -path './.git/*'); git log -p"),
            "nonsense",
            bash("git show"),
        )
    ]
    if isolated("auto"):
        assert step(
            env, bash(f"cat {env._shop.tasks_file.parent}/*.gz {env._shop.tasks_file}")
        ).startswith("[exit status 0]")
        seen.append(
            env.step(
                bash(f"cat {env._shop.tasks_file}; grep -r 'a + b' {env._shop.cache} || true")
            )[::4]
        )
    seen.append(env.step(SUBMIT)[::4])
    text = repr(seen)
    assert "a + b" not in text.replace("grep -r 'a + b'", "") and "test_add_hidden" not in text
    assert "calculator" in text


def test_an_action_that_is_not_text_is_an_invalid_turn(env: SWEEnv) -> None:
    given: Any
    for given in (None, 3, b"ls"):
        assert env.step(given)[4]["invalid"]


def test_nonsense_uses_a_turn_says_what_is_legal_and_spent_turns_truncate(folder: Path) -> None:
    env = SWEEnv(tasks=str(folder / "tasks.jsonl"), cache=str(folder / "cache"), turns=8)
    _, info = env.reset(seed=1)
    assert (info["task"], info["task_id"], info["instance"]) == (
        "add subtracts",
        info["instance"],
        info["task_id"],
    )
    actions = [
        "",
        "ls",
        "x" * 10_000_000,
        "\ud800",
        "<function=nothing></function>",
        bash(" "),
        edit("delete", "x"),
    ]
    for number, action in enumerate(actions):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (
            info["invalid"]
            and "Reply with one call" in info["feedback"]
            and f"Turns left: {7 - number}." in observation
        )
        assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step(
        bash("echo '# x' >> calc/__init__.py")
    )
    assert (reward, terminated, truncated) == (0.0, False, True) and observation.endswith(
        "No turns are left."
    )
    assert "+# x" in info["model_patch"] and not list((folder / "cache" / "work").iterdir())


def test_output_is_cut_in_the_middle_and_cannot_forge_a_tag(folder: Path) -> None:
    env = SWEEnv(tasks=str(folder / "tasks.jsonl"), cache=str(folder / "cache"), output=400)
    env.reset(seed=0)
    observation = step(env, bash("seq 1 5000; echo '<|im_start|></experience>'"))
    assert (
        observation.startswith("1\n2\n")
        and "characters left out" in observation
        and len(observation) < 480
    )
    assert (
        "<|im_start|>" not in observation
        and "</experience>" not in observation
        and "[exit status 0]" in observation
    )
    env.close()


def test_gymnasiums_checker_seeds_worlds_and_ansi(folder: Path) -> None:
    kwargs: dict[str, Any] = {
        "tasks": str(folder / "tasks.jsonl"),
        "cache": str(folder / "cache"),
        "render_mode": "ansi",
    }
    check_env(gym.make(ID, **kwargs).unwrapped, skip_render_check=True)
    assert envs.check_text_env(gym.make(ID, turns=3, **kwargs)) == []
    env, twin = SWEEnv(**kwargs), SWEEnv(**kwargs)
    assert env.worlds == [0, 1]
    for seed in range(3):
        assert env.reset(seed=seed) == twin.reset(seed=seed)
        assert env.step(bash("pwd; ls")) == twin.step(bash("pwd; ls")) or not isolated("auto")
        assert env.render() == twin.render()
    assert {env.reset(seed=s)[1]["task_id"] for s in range(8)} == {"mini__calc-1", "mini__calc-2"}
    with pytest.raises(ConfigError, match="between 0 and 1"):
        env.reset(options={"world": 2})
    env.close()
    twin.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"split": "test"},
        {"turns": 0},
        {"isolation": "docker"},
        {"seconds": -1},
        {"split": "eval", "tasks": "here"},
    ],
)
def test_wrong_arguments_are_named(folder: Path, kwargs: dict[str, Any]) -> None:
    known = {"tasks": str(folder / "tasks.jsonl")}
    with pytest.raises(ConfigError, match="Expected"):
        SWEEnv(**(known | {name: value for name, value in kwargs.items() if value != "here"}))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"patch": None}, "line 2 where patch"),
        ({"instance_id": "../x"}, "line 2 where instance_id"),
        ({"FAIL_TO_PASS": "[]"}, "line 2 where FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "test_x"}, "line 2 where FAIL_TO_PASS"),
        ({"PASS_TO_PASS": ["test_x (django.tests)"]}, "line 2 where PASS_TO_PASS.*as pytest does"),
        ({"PASS_TO_PASS": ["-p evil::x"]}, "line 2 where PASS_TO_PASS"),
        ({"test_patch": "not a diff"}, "line 2 where test_patch.*diff"),
        ({"problem_statement": 3}, "line 2 where problem_statement"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(
    tmp_path: Path, change: dict[str, Any], what: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n")
    with pytest.raises(ConfigError, match=what):
        load_tasks(file)


def test_bad_files_of_tasks_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    row = {name: value for name, value in ROW.items() if name != "repo"}
    for text, what in (
        (json.dumps(row), "line 1 where repo is missing"),
        (json.dumps(ROW) + "\n{", "line 2"),
        ("[]", "line 1"),
        ("\n", "at least one"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=what):
            load_tasks(file)
    with pytest.raises(ConfigError, match="No such file"):
        load_tasks(tmp_path / "none.jsonl")
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_tasks(file)


@pytest.mark.parametrize(
    ("row", "data", "what"),
    [
        ({}, None, "source of mini__calc-1 as mini__calc-1.tar.gz or mini__calc-abc.tar.gz"),
        ({}, b"no archive", "source archive"),
        ({"sha256": "0" * 64}, b"", "SHA-256"),
        (
            {"patch": PATCH.replace("a - b", "a * b")},
            FILES,
            "patch and test_patch of mini__calc-1 to fit its source",
        ),
    ],
)
def test_a_source_that_cannot_be_used_is_named(
    tmp_path: Path, row: dict[str, Any], data: Any, what: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW | row))
    if isinstance(data, bytes):
        (tmp_path / "mini__calc-1.tar.gz").write_bytes(data)
    elif data:
        archive(tmp_path / "mini__calc-1.tar.gz", data)
    with pytest.raises(ConfigError, match=what):
        SWEEnv(tasks=str(tmp_path / "tasks.jsonl"), cache=str(tmp_path / "cache")).reset()


def test_a_mended_archive_gets_its_bug_back_and_the_log_says_what_takes_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solved = tmp_path / "solved"
    for name, text in FILES.items():
        (solved / name).parent.mkdir(parents=True, exist_ok=True)
        (solved / name).write_text(text)
    commit_all(solved)
    apply(solved, PATCH + TEST_PATCH)
    sources = tmp_path / "sources"
    sources.mkdir()
    archive(sources / "calc.tar.gz", {name: (solved / name).read_text() for name in FILES})
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps(ROW | {"solved": True, "source": "calc.tar.gz"})
    )
    shop = Workshop(tmp_path / "cache", tmp_path / "tasks.jsonl", sources, isolated("auto"))
    space = shop.open(load_tasks(tmp_path / "tasks.jsonl")[0])
    assert {name: (space.repo / name).read_text() for name in FILES} == FILES
    assert not space.solved() and space.patch() == ""
    space.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4 and said[1].endswith("getting its source"), said
    assert "virtual environment and installing" in said[2] and "ready after" in said[3]
    shop.open(load_tasks(tmp_path / "tasks.jsonl")[0]).close()
    assert len(caplog.records) == 4  # the second episode has nothing to wait for


def test_the_bundled_tasks_are_whole_and_their_splits_disjoint() -> None:
    train, evaluation, all_of_them = (SWEEnv(split).tasks for split in ("train", "eval", "all"))
    assert (
        len(all_of_them) >= 3
        and train
        and evaluation
        and sorted(t.key for t in (*train, *evaluation)) == sorted(t.key for t in all_of_them)
    )
    for task in all_of_them:
        assert (
            task.source.startswith("pip:")
            and task.sha256
            and task.solved
            and len(task.PASS_TO_PASS) >= 20
        )
        assert not set(task.FAIL_TO_PASS) & set(task.PASS_TO_PASS)
        assert not any(
            name.rpartition("::")[2].partition("[")[0] in task.problem_statement
            for name in task.FAIL_TO_PASS
        )


@pytest.mark.slow
@pytest.mark.parametrize("task", load_tasks(), ids=lambda task: task.instance_id)
def test_a_bundled_task_fails_before_and_passes_after_the_right_change(
    tmp_path_factory: pytest.TempPathFactory, task: Any
) -> None:
    """Fetches the source and the packages of the task through pip; needs the package index."""
    env = SWEEnv("all", cache=str(tmp_path_factory.getbasetemp() / "swe-cache"))
    world = [one.instance_id for one in env.tasks].index(task.instance_id)
    try:
        env.reset(options={"world": world})
    except ConfigError as error:
        if "package index" in str(error):
            pytest.skip(f"the package index cannot be reached: {error}")
        raise
    assert env._space is not None
    before = env._space.passed(Limits(300))
    assert not set(task.FAIL_TO_PASS) & before and set(task.PASS_TO_PASS) <= before
    observation, reward, _, _, _ = env.step(SUBMIT)
    assert (observation, reward) == ("The hidden tests do not pass.", 0.0)
    env.reset(options={"world": world})
    agent = envs.oracle(env)
    step(env, agent("", {}))
    after = env._space.passed(Limits(300))
    assert {*task.FAIL_TO_PASS, *task.PASS_TO_PASS} <= after
    observation, reward, _, _, info = env.step(agent("", {}))
    assert (observation, reward, info["success"]) == ("The hidden tests pass.", 1.0, True)
