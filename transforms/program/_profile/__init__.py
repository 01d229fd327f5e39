"""Where the time of a program goes, and what differs between two."""
