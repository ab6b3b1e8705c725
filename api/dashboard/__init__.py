"""The dashboard's files, served as they are; see dashboard_files.py."""
