"""State that every operation of a buffer checks: does a graph record it, and was the one before it cut short?"""
