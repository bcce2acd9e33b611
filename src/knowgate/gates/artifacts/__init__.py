"""The folder format of fitted gates and arbiters: files, manifest, numpy classifiers, drift checks."""
