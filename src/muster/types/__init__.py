"""Values: frozen records that every other layer speaks in. Nothing here acts or decides."""
