"""HDF5 files of simulators: robomimic's, which robosuite, LIBERO, MimicGen and Isaac Lab write, and ManiSkill's."""
