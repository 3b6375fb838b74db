"""When may ranks start to talk? Who waits for the fabric, and where they are told that it is ready."""
