"""An engine that computes nothing, with times from a roofline model."""
