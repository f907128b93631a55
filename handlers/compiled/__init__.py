"""Models that AOTInductor compiled."""
