"""Engine directory to tokens: the step loop and everything around it."""
