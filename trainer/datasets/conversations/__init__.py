"""Messages, chat templates and turns."""
