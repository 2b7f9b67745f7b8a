"""`dspark train`: a DSpark drafter for a target, from data that the target writes itself."""
