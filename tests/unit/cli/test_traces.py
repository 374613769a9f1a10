"""Public traces become trajectories; a bad line is told by its number and field."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from services.cli.traces import json_lines
from services.cli.traces.json_lines import MAX_BAD_LINES_TOLD, BadLines
from services.cli.traces.message_lists import read_message_lists
from services.cli.traces.mooncake import read_mooncake

READERS = (read_mooncake, read_message_lists)


def written(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def asked(timestamp, input_length, output_length, *hashes):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hashes),
    }


def lengths(agents):
    return [
        [(turn.num_appended_tokens, turn.num_generated_tokens) for turn in agent.rounds]
        for agent in agents
    ]


def test_requests_of_one_conversation_become_one_agent(tmp_path):
    path = written(
        tmp_path,
        asked(0, 1100, 100, 1, 2, 3),
        asked(5, 700, 10, 8, 9),
        asked(2000, 1300, 50, 1, 2, 4),
        asked(9000, 2000, 7, 1, 2, 4, 5),
    )
    bad = BadLines()
    agents = read_mooncake(path, bad, 100)
    assert bad.count == 0
    assert lengths(agents) == [[(1100, 100), (100, 50), (650, 7)], [(700, 10)]]
    assert [agent.name for agent in agents] == ["trace:1", "trace:2"]
    assert agents[0].num_tokens == 2007


def test_requests_that_only_share_a_prefix_are_agents_that_share_it(tmp_path):
    path = written(
        tmp_path, asked(0, 1500, 100, 1, 2, 3), asked(1, 1500, 100, 1, 2, 4), asked(2, 400, 1, 1)
    )
    agents = read_mooncake(path, BadLines(), 100)
    assert lengths(agents) == [[(1500, 100)], [(1500, 100)], [(400, 1)]]
    one, two, short = (
        [token for part in agent.rounds[0].parts for token in part.token_ids(4096)]
        for agent in agents
    )
    assert one[:1024] == two[:1024]
    assert one[1024:1030] != two[1024:1030]
    assert one[:400] == short


def test_requests_are_taken_in_the_order_of_their_times_and_each_end_goes_on_once(tmp_path):
    path = written(
        tmp_path,
        asked(50, 1400, 20, 1, 2, 5),
        asked(60, 1410, 20, 1, 2, 6),
        asked(0, 1100, 100, 1, 2, 3),
    )
    agents = read_mooncake(path, BadLines(), 100)
    assert lengths(agents) == [[(1100, 100), (200, 20)], [(1410, 20)]]


def test_no_more_requests_are_read_than_asked_for(tmp_path):
    path = written(tmp_path, *(asked(n, 10, 1, n) for n in range(9)))
    assert len(read_mooncake(path, BadLines(), 4)) == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "no JSON"),
        (b"[1]", "the line is no object"),
        (b"\xff\xfe{}", "no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        ({"timestamp": 1}, "input_length is no whole number"),
        (asked(0, 0, 1), "input_length is not from 1 to 16777216"),
        (asked(0, True, 1, 1), "input_length is no whole number"),
        (asked(0, 10, 1.5, 1), "output_length is no whole number"),
        (asked(0, 10, 0, 1), "output_length is not from 1"),
        (asked("soon", 10, 1, 1), "timestamp is no number"),
        (asked(float("nan"), 10, 1, 1), "timestamp is not a finite number"),
        (asked(0, 10, 1, 1, 2), "hash_ids has 2 items, and input_length 10 needs 1"),
        (asked(0, 10, 1, "x"), "hash_ids[0] is no whole number"),
        (asked(0, 10, 1) | {"hash_ids": 5}, "hash_ids is no list"),
    ],
)
def test_a_bad_line_of_a_request_trace_is_told_and_the_others_are_read(tmp_path, line, reason):
    path = written(tmp_path, asked(0, 10, 1, 1), line, asked(1, 20, 1, 2))
    bad = BadLines()
    assert lengths(read_mooncake(path, bad, 100)) == [[(10, 1)], [(20, 1)]]
    assert bad.count == 1
    assert bad.told().startswith("trace.jsonl:2: ")
    assert reason in bad.told()


def test_a_list_of_messages_becomes_rounds(tmp_path):
    call = {"function": {"name": "bash", "arguments": "x" * 16}}
    messages = [
        {"role": "system", "content": "s" * 400},
        {"role": "user", "content": [{"type": "text", "text": "u" * 41}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "t" * 8},
        {"role": "assistant", "content": "a" * 80},
        {"role": "assistant", "content": "more"},
        {"role": "user", "content": "unanswered"},
    ]
    path = written(tmp_path, {"messages": messages}, messages, {"trajectory": messages[:3]})
    bad = BadLines()
    agents = read_message_lists(path, bad, 100)
    assert bad.count == 0
    rounds = [(100 + 11, 5), (2, 20 + 1)]
    assert lengths(agents) == [rounds, rounds, rounds[:1]]
    assert agents[0].rounds == agents[1].rounds, "equal texts are equal tokens"
    assert agents[0].rounds[0].parts[0].seed != agents[0].rounds[0].parts[1].seed
    assert lengths(read_message_lists(path, bad, 1, chars_per_token=2.0))[0][0] == (221, 10)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({}, "the line has no messages or trajectory"),
        (b"7", "the line is no list"),
        ({"messages": 3}, "messages is no list"),
        ({"messages": []}, "messages has no assistant's message"),
        ({"messages": ["hi"]}, "messages[0] is no object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is no text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is no list"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0] is no object"),
        (
            {"messages": [{"role": "user", "content": [{"text": 5}]}]},
            "messages[0].content[0].text is no text",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing before it"),
        (
            {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function is no object",
        ),
    ],
)
def test_a_bad_line_of_messages_is_told_by_its_field(tmp_path, line, reason):
    good = {"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant"}]}
    bad = BadLines()
    assert len(read_message_lists(written(tmp_path, good, b"", line, good), bad, 100)) == 2
    assert bad.count == 1
    assert bad.told().startswith("trace.jsonl:3: ")
    assert reason in bad.told()


FIELDS = (
    *("messages", "role", "content", "text", "tool_calls", "function"),
    *("timestamp", "input_length", "output_length", "hash_ids"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON | st.binary(max_size=30))
def test_whatever_a_line_holds_it_is_used_or_told(tmp_path_factory, value):
    line = value if isinstance(value, bytes) else json.dumps(value).encode()
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(line)
    for read in READERS:
        bad = BadLines()
        agents = read(path, bad, 10)
        parts = [part for part in line.split(b"\n") if part.strip()]
        assert len(agents) + bad.count == len(parts)


def test_lines_and_files_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(json_lines, "MAX_LINES", 3)
    path = written(tmp_path, asked(0, 1, 1, 1), b"x" * 1000, asked(1, 1, 1, 2), b"{}", b"{}")
    bad = BadLines()
    assert len(read_mooncake(path, bad, 100)) == 2
    assert bad.told().splitlines() == [
        "trace.jsonl:2: longer than 200 bytes",
        "trace.jsonl:4: the file has more than 3 lines",
    ]


def test_only_the_first_bad_lines_are_told(tmp_path):
    bad = BadLines()
    assert read_mooncake(written(tmp_path, *[b"{"] * 50), bad, 10) == []
    assert (bad.count, len(bad.examples)) == (50, MAX_BAD_LINES_TOLD)


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_is_not_there_is_refused(tmp_path, read):
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "nosuch", BadLines(), 10)
