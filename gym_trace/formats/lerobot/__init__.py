"""LeRobot data sets, version 3: out and in."""
