"""Reading an extractor's answer: what is good is kept, what is refused is named, nothing raises."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.agents.operations import (
    CONSOLIDATION,
    TEXT_LIMIT,
    Reason,
    clean,
    find_objects,
    operations_schema,
    parse_operations,
)
from experiential.types import Add, Discard, Keep, Merge, ParsedOperations, Return, Update

ADD = '{"op": "add", "text": "good"}'


def answer(content: str) -> str:
    return f"<answer>{content}</answer>"


def texts(parsed: ParsedOperations) -> list[str]:
    return [
        operation.text
        for operation in parsed.operations
        if isinstance(operation, Add | Update | Merge)
    ]


def reasons(parsed: ParsedOperations) -> list[str]:
    return [refusal.reason for refusal in parsed.refused]


def test_the_wire_form_is_read_with_the_span_of_each_operation() -> None:
    objects = [
        '{"op":"add","text":"é <b>"}',
        '{"op":"update","entry":2,"text":"u"}',
        '{"op":"return"}',
    ]
    text = f"<think>é hm</think> {answer('[' + ', '.join(objects) + ']')}"
    parsed = parse_operations(text, shown=2)
    assert [type(operation) for operation in parsed.operations] == [Add, Update, Return]
    assert [
        text[slice(*operation.span)] for operation in parsed.operations if operation.span
    ] == objects
    assert parsed.refused == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(answer(f"```json\n[{ADD}]\n```"), ["good"], id="code fence"),
        pytest.param(
            answer('[{"op": "add", "text": "two\nlines\tand tab"}]'),
            ["two\nlines\tand tab"],
            id="raw newline in a string",
        ),
        pytest.param(answer('[{"op": "add", "text": "good",},]'), ["good"], id="trailing commas"),
        pytest.param(
            answer('[{"op": "add" "text": "good"} {"op": "return"}]'), ["good"], id="missing commas"
        ),
        pytest.param(answer(ADD), ["good"], id="single object"),
        pytest.param(answer('[{"OP": "Add", "Text": "good"}]'), ["good"], id="case"),
        pytest.param(
            answer('{"function_name": "add", "parameters": {"new_memory": "good"}}'),
            ["good"],
            id="nested parameters",
        ),
        pytest.param(
            answer('[{"add": {"text": "good"}}, {"add": "more"}]'),
            ["good", "more"],
            id="operation as key",
        ),
        pytest.param(
            answer('[{"op": "update", "idx": "1", "updated_memory": "good"}]'),
            ["good"],
            id="aliases and numeric string",
        ),
        pytest.param(
            answer('[{"op": "update", "entry": 1.0, "text": "good"}]'), ["good"], id="float entry"
        ),
        pytest.param(
            answer('[{"op": "update", "entry": "entry 1", "text": "good"}]'),
            ["good"],
            id="entry in words",
        ),
        pytest.param(f"[{ADD}]", ["good"], id="no tags"),
        pytest.param(
            f"<think>maybe {{x}} or {ADD}</think>\n[{ADD}]", ["good"], id="no tags after thinking"
        ),
        pytest.param(f"<answer>[{ADD}]", ["good"], id="unclosed answer"),
        pytest.param(f"[{ADD}]</answer>", ["good"], id="unopened answer"),
        pytest.param(f"< Answer >[{ADD}]</ ANSWER >", ["good"], id="sloppy tags"),
        pytest.param(
            answer(f'{{"operations": [{ADD}, {{"op": "return"}}]}}'),
            ["good"],
            id="wrapped in an object",
        ),
        pytest.param(
            answer('[{"op": "add", "text": "say </answer> or <answer> now"}]'),
            ["say </answer> or <answer> now"],
            id="tags in text",
        ),
        pytest.param(
            '[{"op": "add", "text": "say <answer> now"}]',
            ["say <answer> now"],
            id="tag in text without tags",
        ),
        pytest.param(
            answer('[{"op": "add", "text": "Press "go" first, then "stop"."}]'),
            ['Press "go" first, then "stop".'],
            id="unescaped quotes",
        ),
        pytest.param(answer("[{'op': 'add', 'text': 'don't'}]"), ["don't"], id="single quotes"),
        pytest.param(answer('[{op: "add", text: "good"}]'), ["good"], id="bare keys"),
        pytest.param(answer('[{"op": "add", "text": "good"]'), ["good"], id="missing brace"),
        pytest.param(
            answer('{"op": "add", "text": "good"'), ["good"], id="missing brace before the tag"
        ),
        pytest.param(
            answer(r'[{"op": "add", "text": "\u0041\ud83d\ude00 \d \"q\" \\"}]'),
            ['A😀 \\d "q" \\'],
            id="escapes",
        ),
        pytest.param(
            answer('[{"op": "add", "text": "a \\ud800 b\\u0000"}]'),
            ["a \ufffd b"],
            id="lone surrogate and NUL",
        ),
        pytest.param(
            "<answer>[] hm {} </answer> <answer></answer>" + answer(f"[{ADD}]"),
            ["good"],
            id="several answers",
        ),
    ],
)
def test_what_is_good_in_a_bad_answer_is_accepted(text: str, expected: list[str]) -> None:
    assert texts(parse_operations(text, shown=1)) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", Reason.NO_OPERATIONS),
        ("[]", Reason.NO_OPERATIONS),
        ("nothing to say", Reason.NO_OPERATIONS),
        ('[{"op": "add", "text": "cut o', Reason.TRUNCATED),
        ('[{"op": "add", "te', Reason.TRUNCATED),
        ("[{op}]", Reason.MALFORMED),
        ('[{"op": "add", "text": [[[[[[[["deep"]]]]]]]]}]', Reason.MALFORMED),
        ("[{}]", Reason.UNKNOWN_OP),
        ('[{"op": "fly"}]', Reason.UNKNOWN_OP),
        ('[{"op": 7, "text": "x"}]', Reason.UNKNOWN_OP),
        ('[{"text": "x"}]', Reason.UNKNOWN_OP),
        ('[{"op": "merge", "entries": [1], "text": "x"}]', Reason.UNEXPECTED_OP),
        ('[{"op": "add"}]', Reason.MISSING_TEXT),
        ('[{"op": "add", "text": null}]', Reason.MISSING_TEXT),
        ('[{"op": "add", "text": {"title": "x"}}]', Reason.MISSING_TEXT),
        ('[{"op": "add", "text": " \\n "}]', Reason.EMPTY_TEXT),
        (json.dumps([{"op": "add", "text": "x" * (TEXT_LIMIT + 1)}]), Reason.TEXT_TOO_LONG),
        ('[{"op": "update", "text": "x"}]', Reason.MISSING_ENTRY),
        ('[{"op": "update", "entry": true, "text": "x"}]', Reason.MISSING_ENTRY),
        ('[{"op": "update", "entry": 3, "text": "x"}]', Reason.ENTRY_OUT_OF_RANGE),
        ('[{"op": "update", "entry": 0, "text": "x"}]', Reason.ENTRY_OUT_OF_RANGE),
        ('[{"op": "update", "entry": -1, "text": "x"}]', Reason.ENTRY_OUT_OF_RANGE),
        ('[{"op": "update", "entry": 1.5, "text": "x"}]', Reason.ENTRY_OUT_OF_RANGE),
        (f'[{{"op": "update", "entry": {"9" * 5000}, "text": "x"}}]', Reason.ENTRY_OUT_OF_RANGE),
    ],
)
def test_each_refusal_is_named(content: str, reason: Reason) -> None:
    parsed = parse_operations(answer(content), shown=2)
    assert (parsed.operations, reasons(parsed)) == ((), [reason])


def test_one_bad_operation_costs_no_good_one() -> None:
    parsed = parse_operations(
        answer(f'[{ADD}, {{"op": "fly"}}, {{"op": add text}}, {{"op": "return"}}]')
    )
    assert [operation.op for operation in parsed.operations] == ["add", "return"]
    assert reasons(parsed) == ["unknown_op", "malformed"]


def test_a_truncated_list_keeps_its_complete_objects() -> None:
    for opening in ("<answer>[", '{"operations": ['):
        parsed = parse_operations(opening + ADD + ', {"op": "add", "text": "half of')
        assert (texts(parsed), reasons(parsed)) == (["good"], ["truncated"])


def test_a_forgotten_quote_does_not_swallow_the_next_operation() -> None:
    parsed = parse_operations(answer('[{"op": "add", "text": "open}, {"op": "return"}]'))
    assert ([operation.op for operation in parsed.operations], reasons(parsed)) == (
        ["return"],
        ["malformed"],
    )


def test_operations_over_the_limit_are_refused_in_order() -> None:
    content = ", ".join(f'{{"op": "add", "text": "t{n}"}}' for n in range(5))
    parsed = parse_operations(answer(f"[{content}]"), max_operations=2)
    assert (texts(parsed), reasons(parsed)) == (["t0", "t1"], ["too_many"] * 3)


def test_duplicates_and_a_second_change_of_one_entry_are_refused() -> None:
    parsed = parse_operations(
        answer(
            '[{"op": "add", "text": "Same  thing"}, {"op": "add", "text": "same thing"}, {"op":'
            ' "update", "entry": 1, "text": "a"}, {"op": "update", "entry": 1, "text": "b"}, {"op":'
            ' "return"}, {"op": "return"}]'
        ),
        max_operations=6,
    )
    assert (texts(parsed), reasons(parsed)) == (["Same  thing", "a"], ["duplicate"] * 3)


def test_the_last_answer_wins_and_earlier_objects_are_counted() -> None:
    parsed = parse_operations(
        f"{answer(ADD)} No, rather {answer('[' + ADD.replace('good', 'better') + ']')}"
    )
    assert (texts(parsed), reasons(parsed)) == (["better"], ["superseded"])


def test_consolidation_operations_are_read_when_asked_for() -> None:
    text = answer(
        '[{"op": "merge", "entries": ["1", 3, 3], "text": "m"}, {"op": "KEEP", "entry": 2}, {"op":'
        ' "discard", "index": "4"}, {"keep": 1}]'
    )
    parsed = parse_operations(text, max_operations=4, shown=4, kinds=CONSOLIDATION)
    assert [operation.model_copy(update={"span": None}) for operation in parsed.operations] == [
        Merge(entries=(1, 3), text="m"),
        Keep(entry=2),
        Discard(entry=4),
    ]
    assert reasons(parsed) == ["duplicate"], "entry 1 is merged already"
    assert reasons(parse_operations(answer(ADD), kinds=CONSOLIDATION)) == ["unexpected_op"]
    assert reasons(
        parse_operations(
            answer('[{"op": "merge", "entries": [1, 9], "text": "m"}]'),
            shown=2,
            kinds=CONSOLIDATION,
        )
    ) == ["entry_out_of_range"]


def test_the_kind_of_an_addition_is_kept_when_it_is_sane() -> None:
    parsed = parse_operations(
        answer(
            '[{"op": "add", "text": "a", "kind": "warning"}, {"op": "add", "text": "b", "kind":'
            " {}}]"
        )
    )
    assert [operation.kind for operation in parsed.operations if isinstance(operation, Add)] == [
        "warning",
        "lesson",
    ]


OPERATION = st.one_of(
    st.builds(lambda text: {"op": "add", "text": text}, st.text(min_size=1, max_size=40)),
    st.builds(
        lambda n, text: {"op": "update", "entry": n, "text": text},
        st.integers(1, 9),
        st.text(min_size=1, max_size=40),
    ),
    st.just({"op": "return"}),
)


@settings(max_examples=300, deadline=None)
@given(
    operations=st.lists(OPERATION, max_size=6),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    before=st.text(max_size=20),
)
def test_every_object_of_valid_json_is_accounted_for(
    operations: list[dict[str, Any]], ascii_only: bool, indent: int | None, before: str
) -> None:
    content = json.dumps(operations, ensure_ascii=ascii_only, indent=indent)
    parsed = parse_operations(before + answer(content), max_operations=6)
    objects = len(operations)
    assert len(parsed.operations) + len(parsed.refused) == max(objects, 1)
    assert set(texts(parsed)) <= {clean(one["text"]) for one in operations if "text" in one}
    assert set(reasons(parsed)) <= {"empty_text", "duplicate", "no_operations"}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"{}[]\",:\\'<>/ \nano1",
                "<answer>",
                "</answer>",
                '{"op":',
                '"add"',
                '"text":',
                "</think>",
            ]
        ),
        max_size=60,
    ).map("".join)
)
def test_any_text_is_read_without_raising(text: str) -> None:
    parsed = parse_operations(text, shown=1)
    assert parsed.operations or parsed.refused


SEEDS = (
    answer(
        '[{"op": "add", "text": "When the light is red, \\"wait\\"."}, {"op": "update", "entry": 1,'
        ' "text": "a\\nb"}, {"op": "return"}]'
    ),
    answer(
        '```json\n[{"function_name": "add", "parameters": {"new_memory": "x {y} </answer>"}},]\n```'
    ),
    (
        '{"operations": [{"op": "update", "index": "2", "text": "\\ud83d\\ude00"}, {"add": {"text":'
        ' "z"}}]}'
    ),
    "<think>{a: 1}</think>" + answer("[{'op': 'add', 'text': 'don't'}]") + answer(ADD),
    answer(
        '[{"op": "merge", "entries": [1, 2], "text": "m"}, {"op": "keep", "entry": 3}, {"op":'
        ' "discard", "entry": 4}]'
    ),
)
PIECES = (
    *"{}[]\",:\\'<>/\n\x00",
    "<answer>",
    "</answer>",
    '{"op"',
    "\\u12",
    "null",
    "-1",
    "\ud800",
    "999999999999",
)


def mutated(generator: random.Random) -> str:
    text = generator.choice(SEEDS)
    for _ in range(generator.randint(1, 6)):
        at, to = sorted((generator.randint(0, len(text)), generator.randint(0, len(text))))
        match generator.randrange(4):
            case 0:
                text = text[:at] + generator.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[min(to, at + 12) :]
            case 2:
                text = text[:at] + text[at:to] * 2 + text[to:] if len(text) < 2000 else text[:at]
            case _:
                text = text[:to] if generator.random() < 0.3 else text[at:] or text
    return text


def test_ten_thousand_mutated_answers_raise_nothing_and_count_every_object() -> None:
    generator = random.Random(0)
    known, accepted = {reason.value for reason in Reason}, 0
    for _ in range(10_000):
        text = mutated(generator)
        kinds = generator.choice([("add", "update", "return"), CONSOLIDATION])
        parsed = parse_operations(
            text,
            max_operations=generator.randint(0, 3),
            shown=generator.choice([None, 0, 2]),
            kinds=kinds,
        )
        objects, superseded = find_objects(text)
        assert len(parsed.operations) + len(parsed.refused) == len(superseded) + max(
            len(objects), 1
        )
        assert set(reasons(parsed)) <= known
        assert parsed.operations or parsed.refused
        spans = [operation.span for operation in parsed.operations]
        assert all(span and text[span[0]] == "{" for span in spans) and spans == sorted(
            spans, key=lambda span: span or (0, 0)
        )
        parsed.model_dump_json()
        accepted += len(parsed.operations)
    assert accepted > 2_000, "the mutations are mild enough to leave something to accept"


@pytest.mark.parametrize(
    "unit",
    [
        '{"a":',
        '{"',
        "<answer>",
        "{ ",
        '" "',
        '{"a":"{"',
        '[{"op":"add","text":"x","',
        "< ",
        "\\",
        "<answer>{",
    ],
)
def test_reading_takes_linear_time(unit: str) -> None:
    def seconds(count: int) -> float:
        text = unit * count
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            parse_operations(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(16_000) < 10 * max(seconds(4_000), 0.005), (
        "four times the text, at most ten times the time (sixteen if quadratic)"
    )


@pytest.mark.parametrize("merge", [False, True])
def test_the_schema_names_the_operations_and_the_parser_reads_what_it_allows(merge: bool) -> None:
    schema = operations_schema(2, merge, shown=2)
    items = schema["properties"]["operations"]
    assert (schema["type"], items["maxItems"]) == ("object", 2)
    values = {"text": "t", "entry": 1, "entries": [2]}
    kinds = CONSOLIDATION if merge else ("add", "update", "return")
    assert [variant["properties"]["op"]["enum"][0] for variant in items["items"]["anyOf"]] == list(
        kinds
    )
    for variant in items["items"]["anyOf"]:
        assert (
            set(variant["required"]) == set(variant["properties"])
            and variant["additionalProperties"] is False
        )
        operation = {
            key: values.get(key) or given["enum"][0] for key, given in variant["properties"].items()
        }
        parsed = parse_operations(json.dumps({"operations": [operation]}), kinds=kinds, shown=2)
        assert (len(parsed.operations), parsed.refused) == (1, ())
