import json
import re
from dataclasses import replace

import numpy as np
import pytest

from knowgate.errors import ArtifactError, BadSetting, ModelError
from knowgate.models.fake import FakeModel
from knowgate.models.recording_format import append_calls
from knowgate.models.replay import RecordingModel, ReplayModel, _describe_read_call
from knowgate.types import LabelPrompt, Prompt, Reading, Sampling, SignalRequest

MODEL = FakeModel({"sky": {"closed": "blue as the sea", "known": True}}, name="small")
PROMPTS = [Prompt("Why is the sky blue?"), Prompt("首都?", raw=True), Prompt("half a pair \ud800")]
WANT = SignalRequest(draft_tokens=2, layers=(0, -1), after_draft=True, samples=3, seed=7)


def same(left: Reading, right: Reading) -> bool:
    pairs = [(getattr(left, name), getattr(right, name)) for name in ("hidden", "hidden_after")]
    arrays = all(a.keys() == b.keys() and all(np.array_equal(a[x], b[x]) for x in a) for a, b in pairs)
    bare = {"hidden": {}, "hidden_after": {}}
    return arrays and replace(left, **bare) == replace(right, **bare)


def recorder_then_replay(folder):
    yield RecordingModel(MODEL, folder)
    yield ReplayModel(folder)


@pytest.fixture
def folder(tmp_path):
    recorder = RecordingModel(MODEL, tmp_path / "run")
    recorder.read(PROMPTS, WANT)
    return tmp_path / "run"


def test_a_replay_returns_the_recorded_readings_in_any_order(folder):
    readings = ReplayModel(str(folder)).read(PROMPTS[::-1], WANT)
    for got, expected in zip(readings, MODEL.read(PROMPTS[::-1], WANT), strict=True):
        assert same(got, expected)
        assert got.hidden[0].dtype == np.float32


def test_a_replay_has_the_identity_of_the_model(folder):
    replay = ReplayModel(folder)
    assert (replay.name, replay.fingerprint, replay.offers) == ("small", MODEL.fingerprint, MODEL.offers)


def test_generations_and_labels_are_replayed(tmp_path):
    ask = [LabelPrompt(("a sky:", " yes, b:"))]
    for model in recorder_then_replay(tmp_path):
        drawn = model.generate(PROMPTS, max_tokens=5, temperature=1, n=2, seed=1)
        assert drawn == MODEL.generate(PROMPTS, max_tokens=5, temperature=1.0, n=2, seed=1)
        assert np.array_equal(model.label_logits(ask, ["y", "n"])[0], MODEL.label_logits(ask, ["y", "n"])[0])


def test_truncated_samples_have_keys_of_their_own(tmp_path):
    cut = SignalRequest(samples=2, sampling=Sampling(0.6, 0.9, 50), seed=1)
    for model in recorder_then_replay(tmp_path):
        assert model.read(PROMPTS[:1], cut)[0].samples == MODEL.read(PROMPTS[:1], cut)[0].samples
    with pytest.raises(ModelError, match="has no 'read' result"):
        ReplayModel(tmp_path).read(PROMPTS[:1], SignalRequest(samples=2, sampling=Sampling(0.6), seed=1))


def test_recordings_made_before_samples_could_be_truncated_keep_their_keys():
    settings = _describe_read_call(SignalRequest(samples=2))
    assert (settings["temperature"], {"sampling", "top_p", "top_k"} & set(settings)) == (1.0, set())


def test_a_continued_draft_is_replayed(tmp_path):
    for model in recorder_then_replay(tmp_path):
        handles = [reading.resume for reading in model.read(PROMPTS[:1], WANT)]
        assert model.generate(PROMPTS[:1], max_tokens=9, resume=handles)[0][0].text == "blue as the sea"
    with pytest.raises(ModelError, match="has no 'generate' result"):
        ReplayModel(tmp_path).generate(PROMPTS[:1], max_tokens=9)


def test_a_foreign_handle_is_refused(folder):
    for model in (RecordingModel(MODEL, folder), ReplayModel(folder)):
        with pytest.raises(BadSetting, match=r"Reading\.resume` of this model"):
            model.generate(PROMPTS[:1], max_tokens=9, resume=[object()])


def test_an_unrecorded_prompt_is_named_by_its_beginning(folder):
    prompt = Prompt("Who wrote this very long question? " * 10)
    with pytest.raises(ModelError, match=r"'Who wrote this.*…'.*Record again") as caught:
        ReplayModel(folder).read([PROMPTS[0], prompt], WANT)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 350


def test_a_call_with_other_options_is_an_error(folder):
    with pytest.raises(ModelError, match="settings"):
        ReplayModel(folder).read(PROMPTS, replace(WANT, seed=8))


def test_an_incomplete_last_line_is_ignored_and_overwritten(folder):
    calls = folder / "calls.jsonl"
    calls.write_bytes(calls.read_bytes()[:-9])
    with pytest.raises(ModelError, match="half a pair"):
        ReplayModel(folder).read(PROMPTS, WANT)
    assert len(ReplayModel(folder).read(PROMPTS[:2], WANT)) == 2
    RecordingModel(MODEL, folder).read(PROMPTS[2:], WANT)
    assert len(ReplayModel(folder).read(PROMPTS, WANT)) == 3
    assert len(calls.read_text().splitlines()) == 3


def test_each_batch_is_on_disk_when_its_call_returns(tmp_path):
    recorder = RecordingModel(MODEL, tmp_path)
    for count in (1, 2, 3):
        recorder.read(PROMPTS[count - 1 : count], WANT)
        assert len((tmp_path / "calls.jsonl").read_text().splitlines()) == count


def test_the_last_recording_of_a_call_wins(folder):
    lines = (folder / "calls.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    row["result"]["draft"]["text"] = "later"
    append_calls(folder, [row])
    assert ReplayModel(folder).read(PROMPTS[:1], WANT)[0].draft.text == "later"


def test_prompts_are_not_stored(folder):
    assert "Why is" not in (folder / "calls.jsonl").read_text()


def test_a_folder_holds_one_model_only(folder):
    with pytest.raises(ArtifactError, match=r"is of small .* this model is big"):
        RecordingModel(FakeModel(name="big"), folder).read(PROMPTS, WANT)


def test_a_folder_without_a_recording_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=re.escape(str(tmp_path))):
        ReplayModel(tmp_path)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "broken"),
        ("[]", "broken"),
        ('{"version": 1}', "broken"),
        ('{"version": 1, "name": "m", "fingerprint": "f", "offers": ["smell"]}', "smell"),
        ('{"version": 2, "name": "m"}', "version 2, but this knowgate reads only version 1"),
    ],
)
def test_an_invalid_manifest_is_refused(folder, manifest, message):
    (folder / "recording.json").write_text(manifest)
    with pytest.raises(ArtifactError, match=message):
        _ = ReplayModel(folder).offers


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}"])
def test_a_broken_line_is_named_by_its_number(folder, line):
    calls = folder / "calls.jsonl"
    calls.write_text(line + "\n" + calls.read_text())
    with pytest.raises(ArtifactError, match=r"calls.jsonl line 1 is not a valid recorded call"):
        ReplayModel(folder).read(PROMPTS, WANT)


def test_a_missing_calls_file_is_an_error(folder):
    (folder / "calls.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"no calls\.jsonl"):
        ReplayModel(folder).read(PROMPTS, WANT)


def test_a_broken_array_is_refused(folder):
    calls = folder / "calls.jsonl"
    row = json.loads(calls.read_text().splitlines()[0])
    row["result"]["hidden"]["0"]["shape"] = [3]
    calls.write_text(json.dumps(row) + "\n")
    with pytest.raises(ArtifactError, match="is damaged"):
        ReplayModel(folder).read(PROMPTS[:1], WANT)
