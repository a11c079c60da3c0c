

def test_two_ranks_train_one_projection_over_all_records(tmp_path: Path) -> None:
    lines = [line.split() for line in run(ROOT / "examples" / "torchrun.py", tmp_path).splitlines()]
    assert lines[0] == ["2", "ranks,", "4", "shards,", "2000", "records"]
    assert float(lines[1][-1]) < 0.2 * float(lines[1][1])
    assert float(lines[2][-1]) > 0.9
