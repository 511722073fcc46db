"""LeRobot datasets, version 3: out and in."""
