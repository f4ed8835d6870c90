# What only the build needs: from the system; else from Debian's packages, unpacked into .deps (no root needed); else
# the upstream archive. None of it is installed or exported.

set(ZEROONE_DEPS "${PROJECT_SOURCE_DIR}/.deps")

# Unpacks Debian packages into .deps/<name> and sets <out> to that folder; to NOTFOUND where there is no apt.
function(zeroone_debian out name)
  set(root "${ZEROONE_DEPS}/${name}")
  set(${out} "${root}" PARENT_SCOPE)
  if(EXISTS "${root}")
    return()
  endif()
  set(${out} NOTFOUND PARENT_SCOPE)
  find_program(ZEROONE_APT_GET apt-get)
  find_program(ZEROONE_DPKG dpkg)
  mark_as_advanced(ZEROONE_APT_GET ZEROONE_DPKG)
  if(NOT ZEROONE_APT_GET OR NOT ZEROONE_DPKG)
    return()
  endif()

  message(STATUS "Unpacking Debian's ${ARGN} into .deps")
  string(RANDOM LENGTH 8 suffix)  # several builds may do this at once
  set(temporary "${ZEROONE_DEPS}/.${name}-${suffix}")
  file(MAKE_DIRECTORY "${temporary}/root")
  # Without a sandbox: apt's own user may not write to this folder.
  set(apt "${ZEROONE_APT_GET}" -q -o APT::Sandbox::User=root)
  execute_process(COMMAND ${apt} download ${ARGN}
    WORKING_DIRECTORY "${temporary}" RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  if(failed)
    # The machine's package lists are missing or old: use lists of our own, which need no root.
    set(lists "${temporary}/apt")
    file(MAKE_DIRECTORY "${lists}/lists/partial" "${lists}/archives/partial")
    list(APPEND apt -o Dir::State=${lists} -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache=${lists})
    execute_process(COMMAND ${apt} update OUTPUT_QUIET ERROR_VARIABLE reason)
    execute_process(COMMAND ${apt} download ${ARGN}
      WORKING_DIRECTORY "${temporary}" RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE reason)
  endif()
  if(NOT failed)
    file(GLOB archives "${temporary}/*.deb")
    foreach(archive IN LISTS archives)
      execute_process(COMMAND "${ZEROONE_DPKG}" -x "${archive}" "${temporary}/root" COMMAND_ERROR_IS_FATAL ANY)
    endforeach()
    file(RENAME "${temporary}/root" "${root}" RESULT failed)  # fails if another build was faster: as good
    set(${out} "${root}" PARENT_SCOPE)
  else()
    message(STATUS "apt-get could not download ${ARGN}: ${reason}")
  endif()
  file(REMOVE_RECURSE "${temporary}")
endfunction()

# Unpacks an archive with this SHA-256 into .deps/<name> and sets <out> to its one top-level folder.
function(zeroone_archive out name hash url hint)
  set(root "${ZEROONE_DEPS}/${name}")
  if(NOT EXISTS "${root}")
    message(STATUS "Downloading ${url}")
    string(RANDOM LENGTH 8 suffix)
    set(temporary "${ZEROONE_DEPS}/.${name}-${suffix}")
    file(DOWNLOAD "${url}" "${temporary}.tar.gz" STATUS status TLS_VERIFY ON INACTIVITY_TIMEOUT 60)
    list(POP_FRONT status code)
    if(code EQUAL 0)
      file(SHA256 "${temporary}.tar.gz" actual)
      if(NOT actual STREQUAL hash)
        set(code 1)
        set(status "its SHA-256 is ${actual}, not ${hash}")
      endif()
    endif()
    if(NOT code EQUAL 0)
      file(REMOVE "${temporary}.tar.gz")
      message(FATAL_ERROR "${name} is not on this system, not among its Debian packages, and ${url} can't be used: "
        "${status}. Install it (${hint}) and configure again.")
    endif()
    file(ARCHIVE_EXTRACT INPUT "${temporary}.tar.gz" DESTINATION "${temporary}")
    file(RENAME "${temporary}" "${root}" RESULT ignored)
    file(REMOVE_RECURSE "${temporary}" "${temporary}.tar.gz")
  endif()
  file(GLOB folder LIST_DIRECTORIES true "${root}/*")
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

# Highway, of which only headers are used: the target zeroone_highway. There is no build without it, since a scalar
# library is slower by an order of magnitude and nobody would notice why.
function(zeroone_find_highway)
  find_path(ZEROONE_HIGHWAY_INCLUDE hwy/highway.h)
  mark_as_advanced(ZEROONE_HIGHWAY_INCLUDE)
  set(include "${ZEROONE_HIGHWAY_INCLUDE}")
  if(NOT include)
    zeroone_debian(root highway libhwy-dev)
    set(include "${root}/usr/include")
    if(NOT root)
      zeroone_archive(include highway-1.2.0 7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343
        https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz "libhwy-dev, highway-devel, brew highway")
    endif()
  endif()
  # The version is in the one file or the other.
  file(STRINGS "${include}/hwy/highway.h" version REGEX "define HWY_(MAJOR|MINOR|PATCH) ")
  file(STRINGS "${include}/hwy/base.h" more REGEX "define HWY_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9]+" "." version "${version}${more}")
  string(SUBSTRING "${version}" 1 -1 version)
  if(version VERSION_LESS 1.0.3)
    message(FATAL_ERROR "zeroone needs Highway 1.0.3 or newer, and ${include} has ${version}. Name the folder of a newer "
      "one's headers with -DZEROONE_HIGHWAY_INCLUDE=...")
  endif()
  message(STATUS "Highway: ${version}, ${include}")
  add_library(zeroone_highway INTERFACE)
  target_include_directories(zeroone_highway SYSTEM INTERFACE "${include}")
endfunction()

# GTest::gtest and GTest::gtest_main, built from source where the system has none for the target processor.
function(zeroone_find_googletest)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    zeroone_debian(root googletest googletest)
    set(source "${root}/usr/src/googletest")
    if(NOT root)
      zeroone_archive(source googletest-1.14.0 8ad598c73ad796e0d8280b082cebd82a630d73e73cd3c70057938a6501bba5d7
        https://github.com/google/googletest/archive/refs/tags/v1.14.0.tar.gz "libgtest-dev, gtest-devel, brew googletest")
    endif()
    # Not by its own build files, which set policies and flags for the whole tree.
    add_library(zeroone_gtest STATIC EXCLUDE_FROM_ALL "${source}/googletest/src/gtest-all.cc")
    target_include_directories(zeroone_gtest SYSTEM PUBLIC "${source}/googletest/include" PRIVATE "${source}/googletest")
    target_compile_features(zeroone_gtest PUBLIC cxx_std_20)
    target_link_libraries(zeroone_gtest PUBLIC Threads::Threads)
    add_library(zeroone_gtest_main STATIC EXCLUDE_FROM_ALL "${source}/googletest/src/gtest_main.cc")
    target_link_libraries(zeroone_gtest_main PUBLIC zeroone_gtest)
    add_library(GTest::gtest ALIAS zeroone_gtest)
    add_library(GTest::gtest_main ALIAS zeroone_gtest_main)
  endif()
endfunction()

# benchmark::benchmark and benchmark::benchmark_main.
function(zeroone_find_benchmark)
  find_package(benchmark QUIET)
  if(NOT benchmark_FOUND)
    zeroone_debian(root benchmark libbenchmark-dev libbenchmark1debian)
    if(root)
      find_package(benchmark REQUIRED CONFIG PATHS "${root}/usr" NO_DEFAULT_PATH)
    else()
      zeroone_archive(source benchmark-1.8.3 6bc180a57d23d4d9515519f92b0c83d61b05b5bab188961f36ac7b06b0d9e9ce
        https://github.com/google/benchmark/archive/refs/tags/v1.8.3.tar.gz
        "libbenchmark-dev, google-benchmark-devel, brew google-benchmark")
      set(BENCHMARK_ENABLE_TESTING OFF)
      set(BENCHMARK_ENABLE_INSTALL OFF)
      set(BENCHMARK_ENABLE_WERROR OFF)
      set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
      set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)
      add_subdirectory("${source}" "${PROJECT_BINARY_DIR}/benchmark" EXCLUDE_FROM_ALL)
    endif()
  endif()
endfunction()
