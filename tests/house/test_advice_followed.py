"""Every error that advises an argument, a call or a command has a test that follows it, or a reason."""

from __future__ import annotations

from advice import advising, followed

# rooms whose advice needs a library or a device
ELSEWHERE = ("bench", "cluster", "device", "explore", "gpu", "integrations", "lance_table", "mcp")
WITHOUT = {  # a part of the message: why no test of advice follows it
    "a stored payload is not JSON": "a damaged catalogue; tests/trust follows verify()",
    "trained encoders need softmax or uniform": "no public call of a view takes other weights",
    "the same command with --resume goes on from there": "tests/unit/cli/test_cli_import.py interrupts and goes on",
    "is a cluster's table": "needs a cluster; tests/cluster makes the snapshot",
    "or encoder='ngrams', which needs no model": "tests/unit/test_text_encoders.py has no network; others use n-grams",
    "is a Lance table, not one database's directory": "as before",
    "this needs every record in one place": "as before",
    "create the demo again by": "needs a whole demo; tests/unit/cli/test_demo.py creates it again",
    "holds the demo database already": "as before",
    "please report this with the output of softdb verify": "cannot be provoked",
    "were deleted or replaced meanwhile; reload()": "a race with another writer; a memory's reload() is followed",
    "result() was called by the build's own progress": "says why, and advises nothing",
    "needs the GPU build of FAISS": "needs a device",
    "its CUDA and the driver do not fit": "needs a device",
    "give the directory of a database, or --demo": "tests/unit/explore/test_explore_http.py gives both, and each",
    "the keys of --demo were made by 'demo'": "tests/unit/explore/test_explore_demo.py leaves the option out",
    "is outside the filter; every positive": "says what was expected, and advises nothing",
    "the digests of ids in a memory's state_dict()": "says what was expected, and advises nothing",
    "is not a checkpoint that softdb train wrote": "says what was expected",
    "is not a projection that softdb train wrote": "says what was expected",
}


def test_the_advice_of_every_error_is_followed_by_a_test() -> None:
    texts = followed()
    lacking = {
        place: message
        for place, message in advising().items()
        if not {*place.split("/")} & {*ELSEWHERE}
        and not any(text in message for text in texts)
        and not any(part in message for part in WITHOUT)
    }
    assert not lacking


def test_no_reason_outlives_its_message() -> None:
    messages = list(advising().values())
    assert [part for part in WITHOUT if not any(part in message for message in messages)] == []
