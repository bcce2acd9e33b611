"""What fitted gates share: the artefact, its network or judge, and the map from score to probability."""
