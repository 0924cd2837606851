# An overlay on layers in the volume, changed in all ways that leave something to be seen in its upper layer.

make_lower() {
  cd /volume
  mkdir -p lower/replaced lower/moved lower/kept lower/many upper work
  for name in changed removed replaced/old moved/file kept/file many/1 many/2 many/3 many/4 many/5 many/6; do
    echo lower > lower/$name
  done
  ln -s changed lower/link
}

mount_overlay() {
  mkdir -p /m
  mount -t overlay -o lowerdir=/volume/lower,upperdir=/volume/upper,workdir=/volume/work overlay /m
}

change() {
  cd /m
  echo upper >> changed
  rm removed
  # The new directory is opaque.
  rm -r replaced && mkdir replaced && echo new > replaced/new
  mv kept/file kept/renamed
  cp -a moved copy && rm -r moved && mv copy moved
  chown -h 5:6 link
  mknod null c 1 3
  mkfifo pipe
  for name in 1 3 5; do echo upper >> many/$name; done
  cd /
}

list() {
  cd /m
  find . | sort | xargs stat -c '%F %n %u:%g'
  cat changed replaced/* moved/* kept/*
  # A second time all names are known.
  for round in 1 2; do echo $(cat many/*); done
  cd /
}
