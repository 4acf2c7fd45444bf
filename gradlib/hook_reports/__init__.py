"""What each kind of hook receives for a module, and what every entry is."""
