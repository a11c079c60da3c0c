"""JSON texts pass unchecked only if each is exactly the text that softdb would write for its value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softdb import check, errors

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text('aé\n"\\,]'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab,:"), inner),
)


@given(st.lists(VALUES))
def test_texts_of_softdb_pass_unchanged(values: list[Any]) -> None:
    texts = check.payloads(values, len(values)) if values else []
    passed = check.json_texts(texts)
    assert passed is not None
    assert list(passed) == texts
    for form in (passed, passed[:], list(passed)):
        assert not texts or check.payloads(form, len(texts)) == texts


@pytest.mark.parametrize(
    "wrong",
    [
        ['{"a":1', '"b":2}', "1,2"],  # joined by commas, these are three values
        ["[1", "2]", "3,4"],
        ["1,2"],
        [""],
        ["{"],
        ['{"a": 1}'],  # spaces
        ['{"a":1,"a":2}'],
        ["NaN"],
        ["1e999"],
        ["1.50"],
        ["null"],
        ['"\\ud800"'],
        ["[" * 65 + "]" * 65],
        ["[" * 100_000 + "]" * 100_000],
        [{"a": 1}],
    ],
)
def test_other_texts_do_not_pass(wrong: list[Any]) -> None:
    assert check.json_texts(["1", *wrong]) is None
    assert check.json_texts([*wrong, "1", None]) is None


def test_a_text_that_nests_too_deep_is_refused_by_name() -> None:
    value: Any = json.loads("[" * 65 + "]" * 65)
    with pytest.raises(errors.BadInput, match="payload 0 nests deeper than 64"):
        check.payloads([value], 1)
