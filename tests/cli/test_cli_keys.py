"""`knowgate keys`: admin keys are created, listed and revoked."""

from knowgate.server.auth.api_keys import read_keys


def test_an_admin_key_is_created_and_listed(call, tmp_path):
    file = tmp_path / "keys.json"
    assert call("keys", "add", "app", "--keys", file).code == 0
    outcome = call("keys", "add", "operator", "--admin", "--keys", file)
    assert (outcome.code, outcome.out.startswith("kg-")) == (0, True)
    assert {key.name: key.admin for key in read_keys(file)} == {"app": False, "operator": True}
    rows = {line.split()[0]: line for line in call("keys", "list", "--keys", file).out.splitlines()[1:]}
    assert (rows["operator"].rstrip().endswith("yes"), rows["app"].rstrip().endswith("yes")) == (True, False)
