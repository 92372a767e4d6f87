"""The transition tables, and that ARCHITECTURE.md draws them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core.errors import JobError
from batchmill_core.job import (
    CHUNK_TRANSITIONS,
    FINAL_JOB_STATES,
    JOB_TRANSITIONS,
    ChunkState,
    JobState,
    Rows,
    Spec,
    Step,
    check_transition,
    sources_of,
)
from batchmill_core.request import TaskKind
from batchmill_core.usage import Price

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def drawn(column: slice) -> dict[str, set[str]]:
    """The state machine in one column of ARCHITECTURE.md's picture."""
    picture = ARCHITECTURE.read_text().split("## State machines")[1].split("```")[1]
    lines = [line[column].strip() for line in picture.strip("\n").splitlines()]
    table: dict[str, set[str]] = {}
    for line in (re.sub(r"^(job|chunk):\s*", "", x) for x in lines if x):
        if "->" in line:
            source, _, targets = line.partition("->")
            table[source.strip()] = {t.strip() for t in targets.split(",")}
        elif line.endswith(": final"):
            table |= {s.strip(): set() for s in line.removesuffix(": final").split(",")}
    return table


def test_architecture_draws_the_job_states_as_the_code_has_them() -> None:
    code = {str(s): {str(t) for t in nexts} for s, nexts in JOB_TRANSITIONS.items()}

    assert drawn(slice(0, 52)) == code


def test_architecture_draws_the_chunk_states_as_the_code_has_them() -> None:
    code = {str(s): {str(t) for t in nexts} for s, nexts in CHUNK_TRANSITIONS.items()}

    assert drawn(slice(52, None)) == code


def test_every_state_stands_in_the_table() -> None:
    assert set(JOB_TRANSITIONS) == set(JobState)
    assert set(CHUNK_TRANSITIONS) == set(ChunkState)


def test_an_impossible_transition_says_what_is_possible() -> None:
    with pytest.raises(JobError, match=r"abc is done; it cannot become paused .*from here it can become open"):
        check_transition("abc", JobState.DONE, JobState.PAUSED)


def test_a_possible_transition_passes() -> None:
    check_transition("abc", JobState.OPEN, JobState.PAUSED)

    assert JobState.OPEN in sources_of(JobState.PAUSED)


def test_final_states_leave_only_by_a_new_round_or_a_new_submission() -> None:
    ways_out = {s: set(JOB_TRANSITIONS[s]) for s in FINAL_JOB_STATES}

    assert ways_out == {
        JobState.DONE: {JobState.OPEN},
        JobState.CANCELLED: set(),
        JobState.FAILED: {JobState.LOADING},
    }


@given(st.sets(st.integers(0, 500)))
def test_rows_written_and_parsed_are_the_same_rows(numbers: set[int]) -> None:
    rows = Rows.of(numbers)

    assert list(Rows.parse(str(rows))) == sorted(numbers)
    assert len(rows) == len(numbers)
    assert all(n in rows for n in numbers)


@given(st.sets(st.integers(0, 500), min_size=1))
def test_halves_are_disjoint_and_complete(numbers: set[int]) -> None:
    first, second = Rows.of(numbers).halves()

    assert sorted([*first, *second]) == sorted(numbers)
    assert abs(len(first) - len(second)) <= 1


def test_a_spec_survives_its_way_through_json() -> None:
    step = Step(model="m", upstream="m-1", queue="api.a", account="a", price=Price(input=400_000, output=1_600_000))
    spec = Spec(task=TaskKind.CHAT, steps=(step,), params={"max_tokens": 5}, schema={"type": "object"}, stream=True)

    assert Spec.from_dict(spec.as_dict()) == spec
