from launch import ROOT, forked


def test_a_loss_of_split_sequences_has_the_gradients_of_the_plain_formula():
    code, output = forked(2, str(ROOT / "test/models/sequence_sum_checks.py"), timeout=120)
    assert code == 0 and output.count("sequence sums agree") == 2, output[-3000:]
