"""Many models stored as one: on one device or spread over many, called by a strategy, read as a prediction."""
