"""RLDS: episodes as a directory of TensorFlow Datasets, written and read without TensorFlow."""
