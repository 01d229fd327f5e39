"""Scores of predictions against what was true, and measures of their uncertainty."""
