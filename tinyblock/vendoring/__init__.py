"""The command `tinyblock`: copy layers into a project, and keep them known, up to date and right."""
