"""What a flag or the data add to a run: one file for each feature. feature_list.py has their order."""
