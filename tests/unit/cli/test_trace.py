"""``freetoken trace``: from a drawn trace to table, JSON and picture."""

import json
import xml.etree.ElementTree as ElementTree

from freetoken.cli.main import main


def test_synth_and_replay(tmp_path, capsys):
    trace, figures, picture = tmp_path / "t.trace", tmp_path / "f.json", tmp_path / "p.svg"
    shape = ["--num-tokens", "60", "--num-layers", "2", "--num-experts", "16", "--top-k", "2"]
    assert main(["trace", "synth", str(trace), *shape]) == 0
    arguments = [str(trace), "--capacity", "25%,16", "--json", str(figures), "--svg", str(picture)]
    assert main(["trace", "replay", *arguments]) == 0
    text = capsys.readouterr().out
    assert "120 publishes, 60 tokens" in text and "belady" in text and "25.0 %" in text
    (entry,) = json.loads(figures.read_text())
    assert entry["model"] == "synthetic" and len(entry["results"]) == 8
    assert {(r["policy"], r["num_slots"]) for r in entry["results"]} == {
        (policy, slots) for policy in ("crf", "lru", "belady", "static") for slots in (8, 16)
    }
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg") and sum(element.tag.endswith("polyline") for element in root) == 8


def test_json_alone_and_options(tmp_path, capsys):
    trace = tmp_path / "t.trace"
    assert main(["trace", "synth", str(trace), "--num-tokens", "40", "--num-layers", "1", "--locality", "0.5"]) == 0
    capsys.readouterr()
    assert (
        main(["trace", "replay", str(trace), "--policy", "crf", "--capacity", "10", "--margin", "9", "--json", "-"])
        == 0
    )
    (entry,) = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in entry["results"]] == ["crf"]


def test_mistakes_are_told_in_a_line(tmp_path, capsys):
    text = tmp_path / "t.csv"
    text.write_text("a,b\n1,2\n")
    for arguments, told in (
        (["replay", str(tmp_path / "none")], "No such file"),
        (["replay", str(text)], "not a route trace"),
        (["import", str(text), str(tmp_path / "t")], "not a routing CSV"),
        (["synth", str(tmp_path / "t"), "--locality", "2"], "locality 2"),
        (["synth", str(tmp_path / "t"), "--alpha", "nan"], "alpha nan"),
        (["synth", str(tmp_path / "t"), "--alpha", "1e308"], "alpha 1e+308"),
        (["synth", str(tmp_path / "t"), "--seed", "-1"], "seed -1"),
    ):
        assert main(["trace", *arguments]) == 1
        assert told in capsys.readouterr().err
