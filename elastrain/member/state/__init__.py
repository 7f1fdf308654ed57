"""State that the parts of a member's machine share: view, commit, runs, votes."""
