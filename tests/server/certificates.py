"""Self-signed certificates for localhost, of no use elsewhere, valid from 2020 to 2120.

In text, as nothing that tests may rely on can make one.
"""

from pathlib import Path

FIRST_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBWDCB/qADAgECAgEBMAoGCCqGSM49BAMCMBUxEzARBgNVBAMMCmZpcnN0LnRl
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBUxEzARBgNVBAMM
CmZpcnN0LnRlc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAS84fw1kf/7ov5e
dMsGlwllc24nRPrpfW9A8dGI4v4gLeFS/4rRyOowrqVg2z3FGAZZDarT0stJl5CV
k9RnjFkJoz0wOzAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwHQYDVR0OBBYE
FFj/8mmY4YzW4tUhPqbgL6uRi+5eMAoGCCqGSM49BAMCA0kAMEYCIQCLLmrZ0K11
jdY5xvVe/wDp337s9dgye8KB6F1mVa8+WQIhALPGA6yfZzQvCCkAlyvwOsRAesVC
jl+npsStQz0OhDBs
-----END CERTIFICATE-----
"""
FIRST_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgpMcvGcEtLf8G8xSB
+dk9MWoEJXGj0Z+lc+IaygVA0YuhRANCAAS84fw1kf/7ov5edMsGlwllc24nRPrp
fW9A8dGI4v4gLeFS/4rRyOowrqVg2z3FGAZZDarT0stJl5CVk9RnjFkJ
-----END PRIVATE KEY-----
"""
SECOND_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBWjCCAQCgAwIBAgIBATAKBggqhkjOPQQDAjAWMRQwEgYDVQQDDAtzZWNvbmQu
dGVzdDAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowFjEUMBIGA1UE
AwwLc2Vjb25kLnRlc3QwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAATmK2xymfBY
G/PYP7Gbs99+3h2wAv7eW3j4R+Kwq2iVEwGFfiHb0EtCxrVEwlcxbXIM35RtJ2zl
1sNQ4jrRhRIUoz0wOzAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwHQYDVR0O
BBYEFEGgB4v8hRa9MZRLHKUCccCJ3Y4BMAoGCCqGSM49BAMCA0gAMEUCIQCNGq9R
L30xqB7pjC7xLhPi3zEeJd28Gc0wSwq9azf4MgIgRn3X1almyUDxmI6ip8fY84XB
L6mtaDkQ4o4qS7C0724=
-----END CERTIFICATE-----
"""
SECOND_KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgJsrptMp9bJGfBBfD
TUk5BAIfRR+Aec6YD3gxodjLgXyhRANCAATmK2xymfBYG/PYP7Gbs99+3h2wAv7e
W3j4R+Kwq2iVEwGFfiHb0EtCxrVEwlcxbXIM35RtJ2zl1sNQ4jrRhRIU
-----END PRIVATE KEY-----
"""
ENCRYPTED_KEY = """\
-----BEGIN EC PRIVATE KEY-----
Proc-Type: 4,ENCRYPTED
DEK-Info: AES-128-CBC,3CEAF7DC82117C5FA4A9E01C4C3150BC

p4/Obj38uNnhGE2lf1hRoCbu7xQySCuZBn2kQIUIf2qadwE5Y2SmcIm/1m97bAur
4iNDq4ItYdaM6RfewUY/WRfcQIiGpWLRMqP/Iy1VW0VUeuq7+1BTb/IY1EOlAVar
c5W5nbHd2I1qAA+5pEW061YRrEbUtDbxM2341w5heXM=
-----END EC PRIVATE KEY-----
"""


def write_first(folder: Path) -> tuple[str, str]:
    """Paths of certificate and key."""
    return write(folder, FIRST_CERTIFICATE, FIRST_KEY)


def write_second(folder: Path) -> tuple[str, str]:
    """As `write_first`, over the same files."""
    return write(folder, SECOND_CERTIFICATE, SECOND_KEY)


def write(folder: Path, certificate: str, key: str) -> tuple[str, str]:
    (folder / "tls.crt").write_text(certificate)
    (folder / "tls.key").write_text(key)
    return str(folder / "tls.crt"), str(folder / "tls.key")
