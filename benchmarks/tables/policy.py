"""Tables."""
def policy_tables():
    return []
