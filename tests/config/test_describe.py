"""Text that others have written."""

import pytest

from forge_core.config.describe import printable, without_passwords


def test_what_steers_a_terminal_is_shown_as_escapes_and_text_stays_as_it_is():
    assert printable("a\x1b[31m\x07\x9b\u202e\r") == r"a\x1b[31m\x07\x9b\u202e\r"
    assert printable("zwei\n\tZeilen, 🌍 ×") == "zwei\n\tZeilen, 🌍 ×"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at ftp://me:pass@host/runs: no", "at ftp://me:***@host/runs: no"),
        ("s3://KEY:sec/r@et@bucket/x", "s3://KEY:***@bucket/x"),
        ("'simplecache::sftp://me:p@host/x'", "'simplecache::sftp://me:***@host/x'"),
        ("https://host/x?sig=abc&a=1&X-Amz-Signature=d", "https://host/x?sig=***&a=1&X-Amz-Signature=***"),
    ],
)
def test_passwords_of_urls_are_not_shown(text, shown):
    assert printable(text) == shown
    assert without_passwords(text) == shown


@pytest.mark.parametrize("url", ["s3://bucket/runs", "sftp://me@host:22/a@b", "sftp://host:22/a@b", "/a:b@c/d"])
def test_what_has_no_password_is_left_alone(url):
    assert printable(url) == url
    assert without_passwords(url) == url
