"""How the steps of all members are executed, and which strategy is chosen for it."""
