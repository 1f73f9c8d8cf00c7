"""Which slots of a ring hold each trajectory, kept up to date as frames are written and overwritten."""
