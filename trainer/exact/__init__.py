"""--exact: the same bits on every layout: exact sums of gradients, an optimizer of single roundings, a self-test."""
