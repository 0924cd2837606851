# Builds an image of the image `small`, with docker's own builder: the other one is a package of its own.
set -e
mkdir /build
cd /build
echo hello > greeting
cat > Dockerfile <<'END'
FROM small
COPY greeting /
RUN ["/bin/busybox", "sh", "-c", "busybox cat /greeting > /made; busybox echo built >> /made"]
CMD ["/bin/busybox", "cat", "/made"]
END
DOCKER_BUILDKIT=0 docker build --quiet --tag built . > /dev/null
exec docker run --rm built
