"""Experiments of the papers behind the gates: IK, CBDR, DH-ICL, and KB-SAT. What `knowgate sweep` runs."""
