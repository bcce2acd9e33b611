from tests.cli.conftest import Call


def test_a_question_mark_ends_its_sentence(call: Call):
    done = call("sweep", "threshold")
    assert "Did you mean 'thresholds'? Known: " in done.err


def test_a_matrix_of_gates_needs_gates(call: Call):
    done = call("sweep", "plug-in", "--labels", "run")
    assert done.code == 1
    assert "Give their folders: --gates GATE,GATE" in done.err
