"""Names and URLs under which a server is registered."""

from __future__ import annotations

import pytest

from slipstream.protocol.addresses import check_name, normal_url


@pytest.mark.parametrize(
    "url",
    ["http://x:1", "http://x:1/", "HTTP://X:1", "http://x.:1"],
)
def test_spellings_of_one_address_are_one(url: str) -> None:
    assert normal_url(url) == "http://x:1"


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://x:80/", "http://x"),
        ("https://x:443", "https://x"),
        ("https://x:80", "https://x:80"),
        ("http://[::1]:8100/", "http://[::1]:8100"),
        ("http://x/vllm/", "http://x/vllm"),
    ],
)
def test_a_port_that_goes_without_saying_is_left_out(url: str, normal: str) -> None:
    assert normal_url(url) == normal


WRONG = "file:///etc/passwd,,x:1,http://,http://x:y,http://x:0,http://x y,http://x\n,ftp://x,http://me:a@x,http://x?a,http://[x"


@pytest.mark.parametrize("url", WRONG.split(","))
def test_what_is_not_the_url_of_a_host_is_refused_with_the_remedy(url: str) -> None:
    with pytest.raises(ValueError, match=r"server URL .*write it as http://host:port"):
        normal_url(url)


@pytest.mark.parametrize("name", ["", "a\nb", "a b", "a/b", "x" * 65, "a\x00", "\u202eb"])
def test_a_name_that_would_spoil_a_log_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at most 64 characters"):
        check_name(name)


@pytest.mark.parametrize("name", ["vllm-0", "gpu-7.example-8100", "a:1", "b\u00fcro"])
def test_names_of_every_script_are_names(name: str) -> None:
    check_name(name)
