"""Who goes on with a run when its coordinator is lost: pure decisions of one participant, on its own clock."""
