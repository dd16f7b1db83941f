from launch import ROOT, forked


def test_entropies_and_log_probs_at_a_temperature_on_whole_and_on_split_vocabularies():
    code, output = forked(2, str(ROOT / "test/models/entropy_checks.py"), timeout=120)
    assert code == 0 and output.count("entropies agree") == 2, output[-3000:]
