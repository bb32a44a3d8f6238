"""fastppo in other people's trainers. Importing changes nothing: each module has `apply()` and `undo()`."""
