"""What fitted gates share: the artifact, its network or judge, and the map from score to probability."""
