"""What a command printed itself."""


def printed(text: str) -> str:
    """Without what gloo tells of its connections, on stdout with torch 2.9, in parts of lines."""
    return "".join(line for line in text.splitlines(keepends=True) if "peer ranks" not in line)
