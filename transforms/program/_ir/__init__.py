"""Programs as data: the text of a compiled program, where its instructions come from, and what they cost."""
