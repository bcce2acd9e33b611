"""The folder format of fitted gates and arbiters: files, manifest, classifiers in numpy, and drift checks."""
