"""Files: read so that nothing damaged, foreign or hostile is believed, and written so that they are complete or absent.

Everything that the library reads passes through here:

- `reading.py` opens regular files only: no pipes, no devices, and inside a directory of ours no links;
- `document.py` reads and writes files that begin with JSON, such as the manifest of a checkpoint, an exported program
  or a report: a checksum of all other bytes is verified before anything is believed, then the format and its version;
- `schema.py` turns that JSON into dataclasses, and raises if a type differs;
- `errors.py` names the errors. A file is damaged, or of another version; an error of the operating system (no
  permission, too many open files, too little memory) is raised as what it is, and says nothing about the file;
- `replaced.py` reads again what was replaced meanwhile;
- `atomic_write.py` writes a file, or replaces a directory, under a temporary name that is renamed at the end;
- `lock.py` locks a directory, so that two runs do not write to the same one.
"""
