"""Loops by hand, peers and the networks and environments that they share with ours."""
